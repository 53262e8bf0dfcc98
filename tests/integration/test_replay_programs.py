"""Replay cases about the programs around an engine: event loops, threads, scripts, signals, interpreters that exit."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

import asyncllm
from asyncllm import LLM, AsyncLLM, EngineConfig
from asyncllm.errors import ConfigError, EngineStartError, ModelNotFoundError, UsageError
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support import leaks
from tests.support.scripted import ENDLESS, LETTERS, assert_settled, assert_works, letters_llm

pytestmark = pytest.mark.usefixtures("no_leaks")

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.from_options(str(write_tiny_checkpoint(tmp_path)), **scripted_options(tokens=LETTERS))


async def ask(llm: AsyncLLM, max_tokens: int = 3) -> str:
    return (await llm.generate("prompt", max_tokens=max_tokens)).text


# ---------------------------------------------------------------------------------------------------- loops and threads
@pytest.mark.parametrize("run", [asyncio.run, asyncllm.run, anyio.run], ids=["asyncio", "uvloop", "anyio"])
def test_r24_one_object_in_two_runs(config: EngineConfig, run: Any) -> None:
    llm = AsyncLLM(config)

    async def one() -> str:
        return await ask(llm)

    start = (lambda: run(one())) if run is asyncio.run else (lambda: run(one))
    assert start() == "abc"
    pid = llm.engine_pid
    assert start() == "abc"
    assert llm.engine_pid == pid
    asyncio.run(llm.aclose())


def test_one_object_on_asyncio_then_trio_then_asyncio(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    assert anyio.run(ask, llm) == "abc"
    assert anyio.run(ask, llm, backend="trio") == "abc"
    assert anyio.run(ask, llm) == "abc"
    anyio.run(llm.aclose, backend="trio")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_streams_of_a_run_that_is_over_are_aborted(config: EngineConfig, backend: str) -> None:
    llm = AsyncLLM(config)
    streams = []

    async def leave() -> None:
        streams.append(llm.stream("prompt", **ENDLESS))
        streams.append(llm.stream("prompt", **ENDLESS))
        await llm.start()
        await anext(streams[0])

    async def later() -> None:
        await assert_settled(llm)
        with pytest.raises(UsageError, match="event loop"):
            async for _ in streams[0]:
                pass
        await assert_works(llm)
        await llm.aclose()

    anyio.run(leave, backend=backend)
    anyio.run(later, backend=backend)


def test_a_stopped_loop_goes_on_where_it_was(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    with asyncio.Runner() as runner:
        assert runner.run(ask(llm)) == "abc"
        assert runner.run(ask(llm)) == "abc"
        assert asyncio.run(ask(llm)) == "abc"  # in between: another loop while the first one stands still
        assert runner.run(ask(llm)) == "abc"
        runner.run(llm.aclose())


def test_a_second_live_loop_is_refused_and_the_first_goes_on(config: EngineConfig) -> None:
    llm = AsyncLLM(config)

    async def main() -> None:
        await llm.start()
        with pytest.raises(UsageError, match="another event loop"):
            await anyio.to_thread.run_sync(asyncio.run, ask(llm))
        stream = llm.stream("prompt", max_tokens=5)
        with pytest.raises(UsageError, match="another event loop"):
            await anyio.to_thread.run_sync(asyncio.run, stream.completion())
        assert (await stream.completion()).text == "abcde"
        await llm.aclose()

    asyncio.run(main())


def test_r22_a_loop_in_a_thread(config: EngineConfig) -> None:
    results: list[str] = []

    async def main() -> None:
        async with AsyncLLM(config) as llm:
            results.append(await ask(llm))

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join(20)
    assert results == ["abc"]


def test_r25_the_synchronous_form_works_inside_a_running_loop(config: EngineConfig) -> None:
    async def main() -> None:
        with LLM(config) as llm:
            assert llm.generate("prompt", max_tokens=3)[0].text == "abc"
        async with AsyncLLM(config) as second:
            assert await ask(second) == "abc"

    asyncio.run(main())


def test_outside_of_a_loop_a_stream_is_made_and_read_later(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    stream = llm.stream("prompt", max_tokens=3)
    assert asyncio.run(stream.completion()).text == "abc"
    with pytest.raises(UsageError, match="event loop"):
        llm.start().send(None)
    asyncio.run(llm.aclose())


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_r27_an_engine_that_waited_for_its_first_request(config: EngineConfig, anyio_backend: object) -> None:
    async with AsyncLLM(config) as llm:
        await anyio.sleep(5)
        assert await ask(llm) == "abc"


@pytest.mark.anyio
async def test_r33_two_engines_in_one_process(tmp_path: Path) -> None:
    async with letters_llm() as first, letters_llm({"tokens": LETTERS[::-1]}) as second:
        one, other = first.stream("prompt", max_tokens=50), second.stream("prompt", max_tokens=50)
        for letter, mirrored in zip("abcde", "zyxwv", strict=True):
            assert (str(await anext(one)), str(await anext(other))) == (letter, mirrored)
        await second.aclose()
        assert len((await one.completion()).token_ids) == 50


@pytest.mark.anyio
async def test_concurrent_starts_share_one_engine(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(llm.start)
        group.start_soon(ask, llm)
    assert len(leaks.children()) == 1
    await llm.start()
    await llm.aclose()
    await llm.aclose()


@pytest.mark.anyio
async def test_b42_a_dropped_object_ends_its_engine(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    assert await ask(llm) == "abc"
    pid = llm.engine_pid
    assert pid is not None
    del llm
    gc.collect()
    with anyio.fail_after(3):
        while leaks.process_lives(pid):  # noqa: ASYNC110 - no event announces it
            await anyio.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------- start-up
@pytest.mark.anyio
async def test_errors_of_the_start_keep_their_type(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path / "nothing", **scripted_options())
    with pytest.raises(ModelNotFoundError, match="nothing"):
        await llm.start()
    with pytest.raises(ModelNotFoundError):
        await llm.generate("prompt")  # tries again
    options = scripted_options(fail_at_start="no such luck")
    llm = AsyncLLM(write_tiny_checkpoint(tmp_path / "tiny"), **options)
    with pytest.raises(EngineStartError, match="no such luck"):
        async with llm:
            pass
    assert not llm.healthy


@pytest.mark.anyio
async def test_progress_is_reported(config: EngineConfig) -> None:
    phases: list[str] = []
    async with AsyncLLM(config, on_progress=lambda phase, fraction: phases.append(phase)):
        assert "load_model" in phases


def test_the_constructor_only_checks_options() -> None:
    llm = AsyncLLM("nowhere", max_num_seqs=3)
    assert llm.config.scheduler.max_num_seqs == 3
    assert not llm.healthy
    assert llm.engine_pid is None
    with pytest.raises(UsageError, match="not started"):
        _ = llm.info
    for options in ({"max_num_seq": 3}, {"max_num_seqs": 0}, {"in_process": True}):
        with pytest.raises(ConfigError):
            AsyncLLM("nowhere", **options)
    with pytest.raises(ConfigError, match="EngineConfig"):
        AsyncLLM(llm.config, max_num_seqs=4)


# ------------------------------------------------------------------------------------------------------- whole programs
def program(body: str, config: EngineConfig) -> str:
    """Return the source of a program that has ``make_llm()`` and runs ``body``."""
    model, options = config.model.model, scripted_options(tokens=LETTERS)
    head = f"""
import asyncio, os, signal, sys, time
import asyncllm
def make_llm():
    return asyncllm.AsyncLLM({model!r}, **{options!r})
"""
    return head + textwrap.dedent(body)


def run_program(source: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(arguments or ("-c", source))]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


TEN_LINES = """
print("body runs")
llm = make_llm()
async def main():
    async for token in llm.stream("prompt", max_tokens=5):
        print(token, end="")
    print()
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["file", "stdin", "repl"])
def test_r23_no_main_guard_is_needed(config: EngineConfig, tmp_path: Path, how: str) -> None:
    source = program(TEN_LINES, config)
    if how == "file":
        (tmp_path / "script.py").write_text(source)
        done = run_program("", str(tmp_path / "script.py"))
    elif how == "stdin":
        done = run_program("", "-", stdin=source)
    else:
        done = run_program("", "-i", "-q", "-c", source, stdin="")
    assert done.stdout == "body runs\nabcde\n"
    assert done.returncode == 0


LEFT_OPEN = {
    "read to its end": "async for _ in llm.stream('prompt', max_tokens=5): pass",
    "a stream is left": "globals()['kept'] = llm.stream('prompt', ignore_eos=True); await anext(kept)",
    "tasks are left": "kept = [asyncio.ensure_future(llm.generate('prompt', ignore_eos=True)) for _ in range(5)]\n"
    "    await asyncio.sleep(0.05)",
    "nothing was asked": "await llm.start()",
    "it was starting": "globals()['kept'] = asyncio.ensure_future(llm.start()); await asyncio.sleep(0.05)",
}


@pytest.mark.parametrize("left", LEFT_OPEN)
@pytest.mark.parametrize("run", ["asyncio.run(main())", "asyncllm.run(main)", "import trio; trio.run(main)"])
def test_r26_leaving_without_close_is_quick_and_quiet(config: EngineConfig, left: str, run: str) -> None:
    if "trio" in run and "asyncio." in LEFT_OPEN[left]:
        pytest.skip("trio has no tasks that are left over")
    body = f"""
llm = make_llm()
async def main():
    {LEFT_OPEN[left]}
    print("main ends", time.time())
{run}
"""
    done = run_program(program(body, config))
    ended = time.time()
    assert done.stderr == ""
    assert done.returncode == 0
    assert ended - float(done.stdout.split()[-1]) < 2


def test_r26_a_local_object_that_was_never_closed(config: EngineConfig) -> None:
    body = """
async def main():
    llm = make_llm()
    print((await llm.generate("prompt", max_tokens=5)).text)
asyncio.run(main())
"""
    done = run_program(program(body, config))
    assert (done.stdout, done.stderr, done.returncode) == ("abcde\n", "", 0)


def test_r20_an_application_that_drains_on_sigterm(config: EngineConfig) -> None:
    body = """
async def read(llm, number):
    reasons = [token.finish_reason async for token in llm.stream("prompt", max_tokens=8000, ignore_eos=True)]
    return reasons[-1]
async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with make_llm() as llm:
        await llm.collective_rpc("set_script", {"tokens": [97], "step_ms": 5})
        tasks = [asyncio.create_task(read(llm, i)) for i in range(10)]
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert not await llm.drain(0.2)
        await llm.aclose()
        print(*await asyncio.gather(*tasks))
asyncio.run(main())
"""
    done = run_program(program(body, config))
    assert done.stderr == ""
    assert done.stdout.split() == ["abort"] * 10
    assert done.returncode == 0


def test_r21_ctrl_c_is_one_keyboard_interrupt_and_no_handler_changes(config: EngineConfig) -> None:
    body = """
def handlers():
    return [signal.getsignal(s) for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
before = handlers()
async def main():
    async with make_llm() as llm:
        inside = handlers()
        async for _ in llm.stream("prompt", max_tokens=8000, ignore_eos=True):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", handlers() == before)
"""
    done = run_program(program(body, config))
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted True\n", "", 0)


def test_r32_logging_of_the_application_is_left_alone(config: EngineConfig) -> None:
    body = """
import logging
logging.basicConfig(level=logging.DEBUG)
before = (list(logging.root.handlers), logging.root.level)
async def main():
    async with make_llm() as llm:
        await llm.generate("prompt", max_tokens=5)
asyncio.run(main())
print((list(logging.root.handlers), logging.root.level) == before)
"""
    done = run_program(program(body, config))
    assert done.stdout == "True\n"
    assert "asyncllm" not in done.stderr


def test_no_noise_in_the_debug_mode_of_asyncio(config: EngineConfig) -> None:
    body = """
import warnings
warnings.simplefilter("error")
async def main():
    async with make_llm() as llm:
        async for _ in llm.stream("prompt", max_tokens=50):
            break
        await llm.stats()
asyncio.run(main(), debug=True)
"""
    done = run_program("", "-X", "dev", "-c", program(body, config))
    noise = [line for line in done.stderr.splitlines() if "took" not in line]  # slow callbacks: the machine is busy
    assert noise == []
    assert done.returncode == 0


def test_r19_the_engine_ends_with_its_killed_parent(config: EngineConfig) -> None:
    body = """
async def main():
    llm = make_llm()
    await llm.start()
    stream = llm.stream("prompt", ignore_eos=True)
    await anext(stream)
    print(llm.engine_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = run_program(program(body, config))
    assert done.returncode == -signal.SIGKILL
    assert leaks.wait_until(lambda: not leaks.process_lives(int(done.stdout)), 2.0)


def test_run_passes_arguments_and_the_result() -> None:
    async def main(a: int, b: int) -> tuple[int, str]:
        return a + b, type(asyncio.get_running_loop()).__module__

    assert asyncllm.run(main, 1, 2) == (3, "uvloop")
    assert os.getpid()
