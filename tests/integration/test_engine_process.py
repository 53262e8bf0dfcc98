"""An engine process that works: requests, utilities, floods, several engines, several event loops."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

from asyncllm.client.async_mp import AsyncMPClient
from asyncllm.client.base import EngineCoreClient
from asyncllm.client.inproc import InprocClient
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.core.engine_core_proc import LOW_PRIORITY
from asyncllm.errors import ConfigError, EngineDeadError, RequestTooLargeError, UsageError, UtilityError
from asyncllm.wire.endpoints import Endpoints
from asyncllm.wire.messages import EngineCoreOutputs, EngineFinishReason, SchedulerStats
from tests.support.engines import (
    Program,
    collect,
    collect_sync,
    connection_of,
    reading,
    request,
    scripted_config,
    started,
    started_sync,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


# ------------------------------------------------------------ requests
async def test_b29_ten_requests_complete_with_exact_token_counts(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        for i in range(10):
            client.add_request(request(i, max_tokens=5 + i))
        tokens = await collect(client, 10)
    assert {i: len(t) for i, t in tokens.items()} == {i: 5 + i for i in range(10)}


@pytest.mark.parametrize("mode", ["sync", "inproc"])
def test_b29_blocking_clients_complete_with_exact_token_counts(tmp_path: Path, mode: str) -> None:
    client = EngineCoreClient.make_client(scripted_config(tmp_path), mode)  # type: ignore[call-overload]
    client.start()
    for i in range(10):
        client.add_request(request(i, max_tokens=5 + i))
    tokens = collect_sync(client, 10)
    assert client.get_output().request_ids == []  # nothing in flight: does not block
    client.close()
    client.close()
    assert {i: len(t) for i, t in tokens.items()} == {i: 5 + i for i in range(10)}
    with pytest.raises(EngineDeadError, match="closed"):
        client.add_request(request(99))


async def test_info_says_what_the_engine_found_out(tmp_path: Path) -> None:
    phases: list[str] = []
    client = AsyncMPClient(scripted_config(tmp_path, num_blocks=64, max_num_seqs=7))
    info = await client.start(lambda phase, fraction: phases.append(phase))
    try:
        assert info is client.info
        assert (info.num_blocks, info.max_num_seqs, info.pid) == (64, 7, client.engine_pid)
        assert phases == ["load_model"]
        assert {"process", "load_model", "engine", "total"} <= info.phase_to_seconds.keys()
        with pytest.raises(UsageError, match="started already"):
            await client.start()
    finally:
        await client.aclose()


async def test_b24_aborted_requests_free_their_blocks_and_the_rest_goes_on(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    async with started(scripted_config(tmp_path, {"gate_path": str(gate)}, num_blocks=64)) as client:
        for i in range(3):
            client.add_request(request(i, max_tokens=500))
        client.abort_requests([0])
        client.abort_requests([1, 2, 77])
        client.add_request(request(3, max_tokens=2))
        await anyio.sleep(0.2)  # nothing tells when all have arrived: the step that holds answers nothing
        gate.unlink()
        tokens = await collect(client, 1)
        async with reading(client):
            stats = await client.call_utility("stats")
    assert set(tokens) == {3}
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64)


async def test_what_is_aborted_while_the_forward_runs_gets_no_token_of_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with started(scripted_config(tmp_path, {"gate_path": str(gate)})) as client:
        gate.touch()
        client.add_request(request(1, max_tokens=100))
        client.add_request(request(2, max_tokens=1))
        async with reading(client):  # the first step holds at the gate with one or both of them
            client.abort_requests([1])
            await anyio.sleep(0.2)  # nothing tells when it has arrived: answers come between steps, and this one holds
            gate.unlink()
            history = (await client.call_utility("collective_rpc", "history"))[0]
    assert sum(1 in step["request_ids"] for step in history) <= 1


async def test_b19_a_request_that_cannot_be_taken_in_fails_alone(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path, num_blocks=4)) as client:
        client.add_request(request(1, prompt=list(range(100)), max_tokens=5))
        outputs = await client.recv()
        assert [(row.request_id, row.reason) for row in outputs.finished] == [(1, EngineFinishReason.ERROR)]
        assert outputs.token_ids == []
        error = outputs.finished[0].error
        assert error is not None
        assert error.kind == RequestTooLargeError.__name__ or "PromptTooLong" in error.kind
        client.add_request(request(2))
        assert len((await collect(client, 1))[2]) == 4


async def test_b20_an_empty_prompt_fails_alone(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        bad = request(1)
        bad.prompt_token_ids = []
        client.add_request(bad)
        assert (await client.recv()).finished[0].reason == EngineFinishReason.ERROR
        client.add_request(request(2))
        assert len((await collect(client, 1))[2]) == 4


async def test_duplicate_id_fails_alone(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        client.add_request(request(1, max_tokens=50))
        client.add_request(request(1))
        tokens: dict[int, list[int]] = {}
        reasons = []
        while len(reasons) < 2:
            outputs = await client.recv()
            tokens.setdefault(1, []).extend(outputs.token_ids)
            reasons += [(row.reason, row.error.kind if row.error else None) for row in outputs.finished]
    assert sorted(reasons) == [(EngineFinishReason.LENGTH, None), (EngineFinishReason.ERROR, "DuplicateRequestError")]
    assert len(tokens[1]) == 50


async def test_b16_a_send_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        with pytest.raises(OverflowError):
            client.add_request(request(1, prompt=[2**64]))
        async with reading(client):
            stats: SchedulerStats = await client.call_utility("stats")
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        client.add_request(request(2))
        assert len((await collect(client, 1))[2]) == 4


async def test_finish_is_answered_and_abort_is_not(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path, {"step_ms": 1})) as client:
        client.add_request(request(1, max_tokens=5000))
        client.add_request(request(2, max_tokens=5000))
        await client.recv()
        client.abort_requests([1])
        client.finish_requests([2])
        finished = []
        while not finished:
            finished = (await client.recv()).finished
    assert [(row.request_id, row.reason) for row in finished] == [(2, EngineFinishReason.ABORT)]


async def test_parked_requests_take_part_in_no_step(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        client.park_requests([1], True)  # unknown yet: ignored
        client.add_request(request(1, max_tokens=3000))
        client.park_requests([1], True)
        async with reading(client):
            await client.call_utility("stats")  # answered though the loop has nothing to do
            steps = (await client.call_utility("stats")).num_steps
            assert (await client.call_utility("stats")).num_steps == steps
            client.park_requests([1], False)
            await client.call_utility("drain")
            assert (await client.call_utility("stats")).num_generated_tokens == 3000


# ------------------------------------------------------------ utilities
async def test_b31_utility_returns_its_value_and_fails_with_a_typed_error(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, reading(client):
        assert await client.call_utility("collective_rpc", "echo", [1, "two", None]) == [[1, "two", None]]
        with pytest.raises(UtilityError, match="RuntimeError: on purpose") as caught:
            await client.call_utility("collective_rpc", "fail", ["on purpose"])
        assert caught.value.method == "collective_rpc"
        assert "In the engine process:\nTraceback" in caught.value.__notes__[0]
        assert await client.call_utility("reset_prefix_cache") is True
        assert isinstance(await client.call_utility("stats"), SchedulerStats)
        assert await client.call_utility("check_health") is None


async def test_only_listed_methods_can_be_called(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, reading(client):
        for name in ("shutdown", "__init__", "step", "executor"):
            with pytest.raises(UtilityError, match="no utility"):
                await client.call_utility(name)


async def test_what_is_not_plain_data_is_refused_on_either_side(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, reading(client):
        with pytest.raises(UtilityError, match="argument of 'collective_rpc' is not plain data"):
            await client.call_utility("collective_rpc", "echo", [object()])
        assert connection_of(client).num_pending_calls == 0


async def test_b32_a_slow_utility_that_is_cancelled_is_forgotten(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, reading(client):
        with anyio.move_on_after(0.01) as scope:
            await client.call_utility("collective_rpc", "sleep_ms", [100])
        assert scope.cancelled_caught
        assert connection_of(client).num_pending_calls == 0
        assert await client.call_utility("collective_rpc", "echo", [7]) == [[7]]


async def test_b34_drain_is_answered_once_nothing_is_left(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path, {"step_ms": 1})) as client, reading(client):
        await client.call_utility("drain")
        client.add_request(request(1, max_tokens=20))
        await client.call_utility("drain")
        stats = await client.call_utility("stats")
    assert (stats.num_running, stats.num_generated_tokens) == (0, 20)


async def test_pause_keeps_requests_and_resume_runs_them(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        async with reading(client):
            await client.call_utility("pause")
            client.add_request(request(1))
            stats = await client.call_utility("stats")
            assert (stats.num_waiting, stats.num_steps) == (1, 0)
            await client.call_utility("resume")
            await client.call_utility("drain")
        client.add_request(request(2))
        assert len((await collect(client, 1))[2]) == 4


def test_utilities_of_the_blocking_clients(tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    for client in (SyncMPClient(config), InprocClient(config)):
        client.start()
        client.add_request(request(1))
        assert client.call_utility("collective_rpc", "echo", [1]) == [[1]]
        client.call_utility("drain")
        assert client.call_utility("stats").num_generated_tokens == 4
        assert len(collect_sync(client, 1)[1]) == 4  # kept, not lost
        with pytest.raises(UtilityError, match="on purpose"):
            client.call_utility("collective_rpc", "fail", ["on purpose"])
        client.close()


# ------------------------------------------------------------ loops, threads, other programs
async def test_b18_a_flood_does_not_starve_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader always has another message ready; a ticker must get its turn about every millisecond."""
    async with started(scripted_config(tmp_path)) as client:
        monkeypatch.setattr(connection_of(client), "next_outputs", EngineCoreOutputs)
        num_ticks, received = 0, 0

        async def tick() -> None:
            nonlocal num_ticks
            while True:
                num_ticks += 1
                await anyio.lowlevel.checkpoint()

        begin = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            while time.perf_counter() - begin < 0.1:
                await client.recv()
                received += 1
            tasks.cancel_scope.cancel()
    assert num_ticks >= 10
    assert received > 10 * num_ticks, "it yields for every message"


def test_r24_one_client_serves_one_event_loop_after_another(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path))

    async def first() -> None:
        await client.start()
        client.add_request(request(1))
        assert len((await collect(client, 1))[1]) == 4
        client.add_request(request(2, max_tokens=2000))  # left in the middle, with a reader that is cancelled
        with anyio.move_on_after(0.005):
            while True:
                await client.recv()

    async def second() -> None:
        client.abort_requests([2])
        client.add_request(request(3))
        tokens = await collect(client, 1)
        if 3 not in tokens:  # request 2 had ended before the abort
            tokens = await collect(client, 1)
        assert len(tokens[3]) == 4

    anyio.run(first, backend="asyncio")
    anyio.run(second, backend="trio")
    anyio.run(client.aclose, backend="asyncio", backend_options={"use_uvloop": True})
    assert client.is_dead


def test_r22_engine_made_outside_the_main_thread(tmp_path: Path) -> None:
    found: list[int] = []

    async def use() -> None:
        async with started(scripted_config(tmp_path)) as client:
            client.add_request(request(1))
            found.append(len((await collect(client, 1))[1]))

    thread = threading.Thread(target=partial(anyio.run, use))
    thread.start()
    thread.join()
    assert found == [4]


async def test_sends_from_any_thread(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:

        def send(first: int) -> None:
            for i in range(first, first + 50):
                client.add_request(request(i))
                client.abort_requests([10_000 + i])

        threads = [threading.Thread(target=send, args=(n * 50,)) for n in range(8)]
        for thread in threads:
            thread.start()
        tokens = await collect(client, 400)
        for thread in threads:
            thread.join()
    assert {len(t) for t in tokens.values()} == {4}


async def test_r33_two_engines_do_not_disturb_each_other(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    async with started(scripted_config(first, {"tokens": [1]})) as one:
        async with started(scripted_config(second, {"tokens": [2]})) as two:
            assert one.engine_pid != two.engine_pid
            one.add_request(request(1, max_tokens=300))
            two.add_request(request(1, max_tokens=3))
            assert await collect(two, 1) == {1: [2, 2, 2]}
        assert await collect(one, 1) == {1: [1] * 300}


async def test_r21_r32_nothing_of_the_caller_is_changed_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def state() -> object:
        root = logging.getLogger()
        return [signal.getsignal(s) for s in signal.valid_signals()], list(root.handlers), root.level

    before = state()
    async with started(scripted_config(tmp_path)) as client:
        assert state() == before
        client.add_request(request(1))
        await collect(client, 1)
        assert state() == before
    assert state() == before
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import sys
print("body runs", flush=True)
import anyio
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.config import EngineConfig
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling
client = SyncMPClient(EngineConfig.from_options(
    sys.argv[1], executor="asyncllm.testing.ScriptedExecutor", executor_options={"tokens": [5]}))
client.start()
client.add_request(EngineCoreRequest(1, [1], EngineSampling(max_tokens=1, ignore_eos=True)))
print(client.get_output().token_ids, flush=True)
client.close()
"""


@pytest.mark.parametrize("how", ["-c", "file", "stdin"])
def test_r23_a_script_with_no_main_guard_runs_once(tmp_path: Path, runtime_root: Path, how: str) -> None:
    from asyncllm.testing import write_tiny_checkpoint

    model = str(write_tiny_checkpoint(tmp_path))
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    if how == "-c":
        program = Program(SCRIPT, runtime_root, model)
    elif how == "file":
        program = Program(f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')", runtime_root, model)
    else:
        with file.open() as source:
            program = Program(
                f"import sys; sys.argv = ['-', {model!r}]; exec(sys.stdin.read())", runtime_root, stdin=source
            )
    with program:
        assert program.end() == ("body runs\n[5]\n", "")


def test_engine_imports_what_the_caller_can_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that lives beside the caller's script, on a path that was added at run time."""
    (tmp_path / "my_executor.py").write_text(
        "import os, sys\n"
        "from asyncllm.testing import ScriptedExecutor\n"
        "class Mine(ScriptedExecutor):\n"
        "    def collective_rpc(self, method, args=(), kwargs=None):\n"
        "        return [os.environ.get('PYTHONPATH'), sys.path]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/user/set/this")
    with started_sync(scripted_config(tmp_path, executor="my_executor.Mine")) as client:
        python_path, path = client.call_utility("collective_rpc", "where")
    assert python_path == "/user/set/this"
    assert path[0] == str(tmp_path)


def test_messages_survive_a_path_too_long_for_ipc(
    tmp_path: Path, runtime_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the sockets are TCP on loopback with CURVE keys that only the private folder holds."""
    deep = runtime_root / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("ASYNCLLM_RUNTIME_DIR", str(deep))
    with started_sync(scripted_config(tmp_path)) as client:
        folder = connection_of(client).process.runtime_dir.path
        endpoints = msgspec.msgpack.decode((folder / "endpoints").read_bytes(), type=Endpoints)
        assert endpoints.to_engine.startswith("tcp://127.0.0.1:")
        assert endpoints.secret_key is not None
        client.add_request(request(1))
        assert len(collect_sync(client, 1)[1]) == 4
    deep.rmdir()


def test_options_that_are_not_plain_data_are_refused(tmp_path: Path) -> None:
    client = SyncMPClient(scripted_config(tmp_path, {"replies": {"a": object()}}))
    with pytest.raises(ConfigError, match="plain data"):
        client.start()
    client.close()


def test_json_values_cross_unchanged(tmp_path: Path) -> None:
    value = json.loads('{"a": [1, 2.5, null, true, "ü"], "b": {"c": -9223372036854775808}}')
    with started_sync(scripted_config(tmp_path)) as client:
        assert client.call_utility("collective_rpc", "echo", [value]) == [[value]]


@pytest.mark.parametrize("share_cores", [False, True])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
def test_an_engine_that_shares_cores_gives_way(tmp_path: Path, anyio_backend: object, share_cores: bool) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with started_sync(scripted_config(tmp_path, share_cores=share_cores)) as client:
        assert client.engine_pid is not None
        lowest = 19
        expected = min(lowest, own + LOW_PRIORITY) if share_cores else own
        assert os.getpriority(os.PRIO_PROCESS, client.engine_pid) == expected
        autogroup = Path(f"/proc/{client.engine_pid}/autogroup")
        if autogroup.is_file():
            assert autogroup.read_text().endswith(f"nice {LOW_PRIORITY if share_cores else 0}\n")
