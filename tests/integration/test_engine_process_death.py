"""Death, both ways: the caller hears of the engine's, the engine of the caller's; nothing is left in either case."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import anyio
import pytest

from asyncllm.client.async_mp import AsyncMPClient
from asyncllm.client.connection import EngineConnection
from asyncllm.client.inproc import InprocClient
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.errors import EngineDeadError, EngineError
from tests.support import leaks
from tests.support.engines import (
    Program,
    add_outputs,
    connection_of,
    reading,
    request,
    scripted_config,
    seconds_until_gone,
    started,
    started_sync,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


KILLED = r"was killed by SIGKILL \(often the kernel's out-of-memory killer\); await llm\.start\(\) starts a new one"


# ------------------------------------------------------------ the engine dies
async def test_r16_sigkill_of_the_engine_is_told_at_once_with_its_exit_code(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path, {"step_ms": 1})) as client:
        client.add_request(request(1, max_tokens=5000))
        await client.recv()
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=KILLED) as caught:
            while True:
                await client.recv()
        assert time.monotonic() - begin < 1.0
        assert caught.value.exit_code == -9
        assert client.is_dead
        for _ in range(2):  # and again, to whoever asks later
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.recv()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                client.add_request(request(2))
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.call_utility("stats")
            client.abort_requests([1])  # never raises


async def test_r16_what_was_received_before_the_death_is_delivered_first(tmp_path: Path) -> None:
    """The engine exits in step 101; nothing is read until it is dead. (The last step may still be in its own hands.)"""
    async with started(scripted_config(tmp_path, {"exit_at_step": 101, "step_ms": 1})) as client:
        client.add_request(request(1, max_tokens=1000))
        process = connection_of(client).process
        assert leaks.wait_until(process.has_ended, 5.0)
        tokens: dict[int, list[int]] = {}
        with pytest.raises(EngineDeadError, match="ended with exit code 1"):
            while True:
                add_outputs(tokens, await client.recv())
    assert len(tokens[1]) >= 99


async def test_death_while_waiting_idle_is_heard(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises(EngineDeadError):
                await client.recv()

        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)


async def test_r17_a_request_after_an_unheard_death_is_refused_or_its_reader_told(tmp_path: Path) -> None:
    """Nobody reads while the engine dies, as between two event loops."""
    async with started(scripted_config(tmp_path)) as client:
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        assert leaks.wait_until(connection_of(client).process.has_ended, 5.0)
        with pytest.raises(EngineDeadError):
            client.add_request(request(1))
            await client.recv()


async def test_b40_an_exception_in_the_forward_is_the_named_cause(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path, {"fail_at_step": 3})) as client:
        client.add_request(request(1, max_tokens=100))
        tokens: dict[int, list[int]] = {}
        with pytest.raises(EngineDeadError, match="scripted failure at step 3") as caught:
            while True:
                add_outputs(tokens, await client.recv())
    assert len(tokens[1]) == 2
    assert caught.value.exit_code == 1
    assert isinstance(caught.value.__cause__, EngineError)
    assert "In the engine process:\nTraceback" in caught.value.__cause__.__notes__[0]
    assert "scripted failure" in (caught.value.log_tail or "")
    assert "Last lines of the engine's log" in caught.value.__notes__[0]


async def test_a_crash_in_native_code_leaves_its_stack_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing.py").write_text(
        "import faulthandler\n"
        "from asyncllm.testing import ScriptedExecutor\n"
        "class Crashing(ScriptedExecutor):\n"
        "    def execute_model(self, scheduler_output):\n"
        "        faulthandler._sigsegv()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with started(scripted_config(tmp_path, executor="crashing.Crashing")) as client:
        client.add_request(request(1))
        with pytest.raises(EngineDeadError, match="was killed by SIGSEGV") as caught:
            await client.recv()
    assert "Segmentation fault" in (caught.value.log_tail or "")
    assert "crashing.py" in caught.value.__notes__[0]


@pytest.mark.parametrize("how", ["death", "close"])
async def test_b33_every_pending_utility_call_fails(tmp_path: Path, how: str) -> None:
    errors: list[BaseException] = []
    async with started(scripted_config(tmp_path)) as client:

        async def call() -> None:
            try:
                await client.call_utility("collective_rpc", "sleep_ms", [60_000])
            except EngineDeadError as error:
                errors.append(error)

        async def read() -> None:
            with contextlib.suppress(EngineDeadError):
                while True:
                    await client.recv()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            for _ in range(5):
                tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            if how == "death":
                assert client.engine_pid is not None
                os.kill(client.engine_pid, signal.SIGKILL)
            else:
                connection_of(client).shutdown_timeout_s = 0.1  # it sleeps, and will not end by itself
                await client.aclose()
        assert connection_of(client).num_pending_calls == 0
        with pytest.raises(EngineDeadError):
            await client.call_utility("stats")
    assert len(errors) == 5


async def test_b33_a_frame_that_cannot_be_decoded_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(scripted_config(tmp_path)) as client:
        connection = connection_of(client)
        decode = connection._decode
        monkeypatch.setattr(connection, "_decode", lambda frame: decode(frame[:-1]))
        with pytest.raises(EngineDeadError, match="cannot be decoded"):
            async with reading_one_group(client):
                await client.call_utility("stats")
        assert connection.num_pending_calls == 0


@contextlib.asynccontextmanager
async def reading_one_group(client: AsyncMPClient):  # type: ignore[no-untyped-def]
    """Read in a task; the body's error is raised as itself."""
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            with contextlib.suppress(EngineDeadError):
                while True:
                    await client.recv()

        tasks.start_soon(read)
        try:
            yield
        except EngineDeadError as error:
            failure = error
        else:
            failure = None
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def test_blocking_client_hears_of_the_death(tmp_path: Path) -> None:
    with started_sync(scripted_config(tmp_path, {"exit_at_step": 51, "step_ms": 1})) as client:
        client.add_request(request(1, max_tokens=1000))
        assert leaks.wait_until(connection_of(client).process.has_ended, 5.0)
        tokens: dict[int, list[int]] = {}
        with pytest.raises(EngineDeadError, match="exit code 1"):
            while True:
                add_outputs(tokens, client.get_output())
        assert len(tokens[1]) >= 49
        with pytest.raises(EngineDeadError, match="exit code 1"):
            client.get_output()
        with pytest.raises(EngineDeadError, match="exit code 1"):
            client.call_utility("stats")


def test_inproc_engine_that_failed_says_so_ever_after(tmp_path: Path) -> None:
    client = InprocClient(scripted_config(tmp_path, {"fail_at_step": 2}))
    client.start()
    client.add_request(request(1, max_tokens=100))
    assert len(client.get_output().token_ids) == 1
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="scripted failure at step 2") as caught:
            client.get_output()
        assert isinstance(caught.value.__cause__, RuntimeError)
    client.close()


async def test_b45_sigterm_ends_an_idle_engine_cleanly_and_is_named(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGTERM)
        with pytest.raises(EngineDeadError, match=r"exit code 0.*SIGTERM") as caught:
            await client.recv()
    assert caught.value.exit_code == 0


async def test_b45_sigterm_while_starting_is_remembered(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path, {"start_ms": 300}))

    def report(phase: str, fraction: float | None) -> None:
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGTERM)

    with pytest.raises(EngineError, match=r"initialization failed.*exit code 0"):
        await client.start(report)


async def test_sigint_of_the_terminal_is_the_callers_alone(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client, reading(client):
        assert client.engine_pid is not None
        assert os.getsid(client.engine_pid) == client.engine_pid  # a terminal's Ctrl-C does not even reach it
        os.kill(client.engine_pid, signal.SIGINT)
        assert await client.call_utility("collective_rpc", "echo", [1]) == [[1]]


async def test_an_engine_that_does_not_end_is_killed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    client = AsyncMPClient(scripted_config(tmp_path, {"gate_path": str(gate)}, shutdown_timeout_s=0.1))
    await client.start()
    client.add_request(request(1))
    pid = client.engine_pid
    assert pid is not None
    begin = time.monotonic()
    await client.aclose()
    assert time.monotonic() - begin < 2.0
    assert not leaks.process_lives(pid)


async def test_close_under_cancellation_still_closes(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path))
    await client.start()
    pid = client.engine_pid
    assert pid is not None
    with anyio.CancelScope() as scope:
        scope.cancel()
        await client.aclose()
    assert not leaks.process_lives(pid)
    await client.aclose()


async def test_two_tasks_may_close_at_once_and_a_reader_is_told(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path))
    await client.start()
    told: list[str] = []

    async def read() -> None:
        try:
            await client.recv()
        except EngineDeadError as error:
            told.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(client.aclose)
        tasks.start_soon(client.aclose)
    assert len(told) == 1


# ------------------------------------------------------------ the caller dies
PARENT = """
import os, sys, time
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.config import EngineConfig
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling
model, script, how = sys.argv[1], eval(sys.argv[2]), sys.argv[3]
client = SyncMPClient(EngineConfig.from_options(
    model, executor="asyncllm.testing.ScriptedExecutor", executor_options={"tokens": [5], **script}))
client.start(lambda *_: print(client.engine_pid, flush=True))
client.add_request(EngineCoreRequest(1, [1], EngineSampling(max_tokens=8000, ignore_eos=True)))
client.get_output()
print("running", flush=True)
exec(how)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    from asyncllm.testing import write_tiny_checkpoint

    return str(write_tiny_checkpoint(tmp_path / "model"))


@pytest.fixture
def runtime_dir(runtime_root: Path):  # type: ignore[no-untyped-def]
    folder = runtime_root / "own"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("script", ["{'step_ms': 1}", "{}"])
def test_r19_b43_engine_ends_when_its_caller_is_killed(model: str, runtime_dir: Path, script: str) -> None:
    with Program(PARENT, runtime_dir, model, script, "time.sleep(60)") as program:
        pid = int(program.line())
        assert program.line() == "running"
        program.process.kill()
        assert seconds_until_gone(pid, runtime_dir) < 2.0


def test_r19_also_when_it_is_still_loading(model: str, runtime_dir: Path) -> None:
    with Program(PARENT, runtime_dir, model, "{'start_ms': 60_000}", "pass") as program:
        pid = int(program.line())
        program.process.kill()
        assert seconds_until_gone(pid, runtime_dir) < 2.0


@pytest.mark.parametrize(
    ("how", "exit_code"),
    [("os._exit(3)", 3), ("raise KeyError('x')", 1), ("sys.exit(0)", 0), ("pass", 0), ("del client; import gc", 0)],
)
def test_b42_b43_b44_r26_engine_ends_with_its_caller_however_that_ends(
    model: str, runtime_dir: Path, how: str, exit_code: int
) -> None:
    with Program(PARENT, runtime_dir, model, "{'step_ms': 1}", how) as program:
        pid = int(program.line())
        assert program.line() == "running"
        begin = time.monotonic()
        _, stderr = program.end()
        assert time.monotonic() - begin < 2.0
        assert program.process.returncode == exit_code
        assert seconds_until_gone(pid, runtime_dir) < 2.0
        assert "KeyError" in stderr if exit_code == 1 else stderr == ""


def test_r19_engine_ends_though_a_fork_of_the_caller_holds_its_pipe(model: str, runtime_dir: Path) -> None:
    how = "pid = os.fork()\nif pid == 0: time.sleep(8); os._exit(0)\nprint(pid, flush=True); time.sleep(60)"
    with Program(PARENT, runtime_dir, model, "{'step_ms': 1}", how) as program:
        pid = int(program.line())
        assert program.line() == "running"
        fork = int(program.line())
        try:
            program.process.kill()
            assert seconds_until_gone(pid, runtime_dir) < 2.0
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_fork_of_the_caller_that_exits_leaves_the_engine_alone(model: str, runtime_dir: Path) -> None:
    how = (
        "pid = os.fork()\nif pid == 0: sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1], client.call_utility('collective_rpc', 'echo', [1])); client.close()"
    )
    with Program(PARENT, runtime_dir, model, "{}", how) as program:
        program.line()
        assert program.line() == "running"
        assert program.line() == "0 [[1]]"
        program.end()
        assert program.process.returncode == 0


def test_r30_folders_of_killed_callers_do_not_pile_up(model: str, runtime_dir: Path) -> None:
    """Caller and engine are both killed, so that neither can clean up; the next start does."""
    for _ in range(3):
        with Program(PARENT, runtime_dir, model, "{}", "time.sleep(60)") as program:
            pid = int(program.line())
            assert program.line() == "running"
            os.kill(pid, signal.SIGSTOP)  # so that it cannot tidy up
            program.process.kill()
            program.process.wait()
            os.kill(pid, signal.SIGKILL)
    assert len(list(runtime_dir.iterdir())) == 1
    with Program(PARENT, runtime_dir, model, "{}", "client.close()") as program:
        program.end()
        assert program.process.returncode == 0
    assert list(runtime_dir.iterdir()) == []


async def test_b42_dropping_the_client_ends_its_engine(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path))
    await client.start()
    pid = client.engine_pid
    assert pid is not None
    del client
    assert seconds_until_gone(pid) < 2.0


def test_a_connection_that_is_never_used_leaves_nothing(tmp_path: Path) -> None:
    connection = EngineConnection(scripted_config(tmp_path))
    pid = connection.process.pid
    connection.close(grace_s=0)
    connection.close(grace_s=0)
    assert not leaks.process_lives(pid)
    client = SyncMPClient(scripted_config(tmp_path / "model"))
    client.close()
    with pytest.raises(EngineDeadError, match="not started"):
        client.get_output()
