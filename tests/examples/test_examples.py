"""Every example runs as a user runs it, from a shell, and leaves nothing on stderr and no process behind."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]


def run_example(name: str, model: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, model],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    if name != "offline.py":  # whose progress bar is on stderr
        assert done.stderr == ""
    return done.stdout


def test_every_example_has_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f'"{path.name}"' not in here] == []


def test_without_a_model_an_example_prints_its_usage() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        done = subprocess.run([sys.executable, path], cwd=EXAMPLES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 1, path.name
        assert f"python examples/{path.name} MODEL" in done.stderr, path.name
        assert "Traceback" not in done.stderr, path.name


@pytest.mark.model
def test_quickstart_answers(smollm2_gguf: Path) -> None:
    assert "Paris" in run_example("quickstart.py", smollm2_gguf)


@pytest.mark.model
def test_structured_output_is_an_object(smollm2_gguf: Path) -> None:
    out = run_example("structured_output.py", smollm2_gguf)
    assert re.search(r"\n[1-5] of 5 stars, (good|mixed|bad)\n\+\d\d \d{3} \d{4} (red|green|blue)\n", out), out


def test_fan_out_reuses_the_shared_prefix(tiny_llama: Path) -> None:
    out = run_example("fan_out.py", tiny_llama)
    found = re.search(r"200 answers in .* s\n(\d+)% of the prompt tokens came from the cache", out)
    assert found, out
    assert int(found[1]) > 60  # the text is 226 of about 290 bytes, and only whole blocks are shared


def test_branches_compute_nothing_twice(tiny_llama: Path) -> None:
    out = run_example("branches.py", tiny_llama)
    assert len(re.findall(r"-> '.*' \(1 computed\)", out)) + len(re.findall(r'-> ".*" \(1 computed\)', out)) == 3, out
    assert "2 of 2 requests computed none of" in out
    assert "tokens, ten prompts at a time" in out


def test_cancellation_leaves_nothing_running(tiny_llama: Path) -> None:
    out = run_example("cancellation.py", tiny_llama)
    assert "task cancelled: True" in out
    assert "left the loop after" in out
    assert "requests still running: 0" in out


def test_trio_nursery(tiny_llama: Path) -> None:
    out = run_example("trio_nursery.py", tiny_llama)
    assert "[a lighthouse]" in out
    assert "[two sisters]" in out
    assert "deadline reached:" in out


def test_offline_answers_in_order(tiny_llama: Path) -> None:
    lines = run_example("offline.py", tiny_llama).splitlines()
    assert [line.split(" is")[0] for line in lines] == [f"The square of {number}" for number in range(2, 34)]


@pytest.mark.model
def test_tools_are_called_and_their_results_used(smollm2_gguf: Path) -> None:
    called, _, answer = run_example("tools.py", smollm2_gguf).partition("\n")
    assert called.startswith("get_weather({'city': 'Paris'}) -> ")
    assert "12 degrees" in answer


# ------------------------------------------------------------------------------------------------- server-sent events
@pytest.fixture
def server(tiny_llama: Path) -> Iterator[str]:
    """The chat server on a free port, in its own process; its base URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "sse_server.py", tiny_llama, str(port)],
        cwd=EXAMPLES.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the server does not answer"
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/stats")
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        out, _ = process.communicate(timeout=20)
    assert process.returncode in (0, -15), out
    assert "Traceback" not in out, out


def ask(max_tokens: int) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": max_tokens}


def test_sse_server_streams_to_the_end(server: str) -> None:
    """Covers "sse_server.py": the whole answer arrives, then its finish reason."""
    with httpx.stream("POST", f"{server}/chat", json=ask(8)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line]
    assert all(event.startswith("data: {") for event in events)
    assert '"finish_reason": "length"' in events[-1] or '"finish_reason": "stop"' in events[-1]


def test_sse_server_stops_generating_when_the_client_disconnects(server: str) -> None:
    with httpx.Client() as client:
        for _ in range(5):
            with client.stream("POST", f"{server}/chat", json=ask(400)) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
            # Leaving the block closes the socket; nothing announces when the server has seen that.
            wait_until_idle(server)
    assert httpx.get(f"{server}/stats").json()["generated"] < 5 * 400


def test_sse_server_refuses_a_bad_request_before_it_runs(server: str) -> None:
    response = httpx.post(f"{server}/chat", json=ask(-1))
    assert response.status_code == 400
    assert "max_tokens" in response.json()["error"]
    response = httpx.post(f"{server}/chat", json={})
    assert response.status_code == 400
    assert "at least one message" in response.json()["error"]
    assert httpx.post(f"{server}/chat", content=b"no JSON").status_code == 400


def wait_until_idle(server: str) -> None:
    deadline = time.monotonic() + 5
    while True:
        stats = httpx.get(f"{server}/stats").json()
        if stats["running"] == stats["waiting"] == 0:
            return
        assert time.monotonic() < deadline, f"still running 5 s after the client went away: {stats}"
        time.sleep(0.01)
