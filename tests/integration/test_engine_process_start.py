"""Starts that fail, are cancelled or time out: a typed error that says what to do, promptly, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import anyio
import pytest

from asyncllm.client.async_mp import AsyncMPClient
from asyncllm.client.inproc import InprocClient
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.config import EngineConfig
from asyncllm.errors import (
    AsyncLLMError,
    ConfigError,
    EngineStartError,
    EngineStartTimeoutError,
    ModelNotFoundError,
)
from asyncllm.testing import scripted_options
from tests.support import leaks
from tests.support.engines import collect, request, scripted_config, started

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


async def start_and_fail(config: EngineConfig, expected: type[AsyncLLMError], match: str) -> AsyncLLMError:
    client = AsyncMPClient(config)
    with pytest.raises(expected, match=match) as caught:
        await client.start()
    assert client.engine_pid is None
    await client.aclose()
    return caught.value


async def test_a_bad_path_is_a_model_not_found_error(tmp_path: Path) -> None:
    config = EngineConfig.from_options(str(tmp_path / "nothing-here"), **scripted_options())
    error = await start_and_fail(config, ModelNotFoundError, "nothing-here")
    assert isinstance(error, ModelNotFoundError)
    assert "nothing-here" in (error.model or "")
    assert "In the engine process" in error.__notes__[0]


async def test_an_executor_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    error = await start_and_fail(
        scripted_config(tmp_path, executor="no.such.Executor"), ConfigError, "cannot be imported"
    )
    assert isinstance(error, ConfigError)
    assert (error.parameter, error.value) == ("executor", "no.such.Executor")


async def test_b41_an_exception_of_the_executor_is_a_start_error_with_its_text(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, {"fail_at_start": "the weights are upside down"})
    error = await start_and_fail(config, EngineStartError, "RuntimeError: the weights are upside down")
    assert isinstance(error, EngineStartError)
    assert error.phase == "load_model"
    assert "the weights are upside down" in (error.log_tail or "")


@pytest.mark.parametrize("client_class", [SyncMPClient, InprocClient])
def test_blocking_clients_raise_the_same_errors(
    tmp_path: Path, client_class: type[SyncMPClient | InprocClient]
) -> None:
    client = client_class(EngineConfig.from_options(str(tmp_path / "nothing-here"), **scripted_options()))
    with pytest.raises(ModelNotFoundError, match="nothing-here"):
        client.start()
    client.close()
    client = client_class(scripted_config(tmp_path, {"fail_at_start": "upside down"}))
    with pytest.raises(EngineStartError, match="RuntimeError: upside down"):
        client.start()
    client.close()


async def test_a_client_can_be_started_again_after_a_failure(tmp_path: Path) -> None:
    model = tmp_path / "later"
    client = AsyncMPClient(EngineConfig.from_options(str(model), **scripted_options(tokens=[1])))
    with pytest.raises(ModelNotFoundError):
        await client.start()
    scripted_config(model)
    await client.start()
    client.add_request(request(1))
    assert await collect(client, 1) == {1: [1, 1, 1, 1]}
    await client.aclose()


async def test_b37_sigkill_while_starting_is_told_promptly(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path, {"start_ms": 60_000}))
    killed_at = 0.0

    def report(phase: str, fraction: float | None) -> None:
        nonlocal killed_at
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        killed_at = time.monotonic()

    with pytest.raises(
        EngineStartError, match=r"engine initialization failed.*SIGKILL.*'load_model'.*memory"
    ) as caught:
        await client.start(report)
    assert time.monotonic() - killed_at < 1.0
    assert (caught.value.exit_code, caught.value.phase) == (-9, "load_model")


async def test_a_process_that_cannot_even_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.client.launcher.ENTRY_MODULE", "asyncllm.no_such_module")
    error = await start_and_fail(
        scripted_config(tmp_path), EngineStartError, "ended with exit code 1 in phase 'process'"
    )
    assert "No module named asyncllm.no_such_module" in error.__notes__[0]


async def test_no_interpreter_to_start_it_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    await start_and_fail(scripted_config(tmp_path), EngineStartError, "'/no/such/python' could not be started")


async def test_a_runtime_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_RUNTIME_DIR", str(tmp_path / "missing"))
    await start_and_fail(scripted_config(tmp_path), EngineStartError, "ASYNCLLM_RUNTIME_DIR")


async def test_b36_a_timeout_says_how_to_allow_more(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, {"start_ms": 60_000}, startup_timeout_s=0.5)
    error = await start_and_fail(
        config, EngineStartTimeoutError, r"after 0.5 s, in phase 'load_model'; raise startup_timeout_s"
    )
    assert isinstance(error, EngineStartTimeoutError)
    assert error.phase == "load_model"


def test_b36_the_timeout_of_the_environment_counts_where_no_option_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCLLM_STARTUP_TIMEOUT_S", "0.3")
    client = SyncMPClient(scripted_config(tmp_path, {"start_ms": 60_000}))
    with pytest.raises(EngineStartTimeoutError, match=r"after 0\.3 s"):
        client.start()
    client = SyncMPClient(scripted_config(tmp_path, startup_timeout_s=60.0))
    client.start()
    client.close()


@pytest.mark.parametrize("phase", ["at once", "hello", "loading"])
async def test_cancelling_a_start_leaves_nothing(tmp_path: Path, phase: str) -> None:
    """The fixture looks for what is left."""
    client = AsyncMPClient(scripted_config(tmp_path, {"start_ms": 60_000}))
    with anyio.CancelScope() as scope:
        if phase == "at once":
            scope.cancel()
        if phase == "hello":
            scope.deadline = anyio.current_time() + 0.02
        await client.start(lambda *_: scope.cancel())
    assert scope.cancelled_caught
    assert client.engine_pid is None
    await client.aclose()


async def test_closing_while_it_starts_ends_the_start(tmp_path: Path) -> None:
    client = AsyncMPClient(scripted_config(tmp_path, {"start_ms": 60_000}))
    loading = anyio.Event()

    async def start() -> None:
        with pytest.raises(EngineStartError):
            await client.start(lambda *_: loading.set())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await loading.wait()
        await client.aclose()


# ------------------------------------------------------------ what it costs to be
async def test_r29_start_and_close_five_times_leaves_descriptors_and_threads_flat(tmp_path: Path) -> None:
    counts = []
    for _ in range(5):
        async with started(scripted_config(tmp_path)) as client:
            client.add_request(request(1))
            await collect(client, 1)
        counts.append((len(leaks.file_descriptors()), len(os.listdir("/proc/self/task"))))
    assert len(set(counts[1:])) == 1, counts


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_r31_idle_costs_nothing(tmp_path: Path, anyio_backend: object) -> None:
    """Processor time of both sides over four idle seconds: half a percent of a core (its clock ticks in 10 ms)."""
    import psutil

    async with started(scripted_config(tmp_path)) as client, anyio.create_task_group() as tasks:
        client.add_request(request(1))
        await collect(client, 1)
        tasks.start_soon(client.recv)
        await anyio.wait_all_tasks_blocked()
        engine = psutil.Process(client.engine_pid)

        def cpu_s() -> float:
            times, own = engine.cpu_times(), time.process_time()
            return times.user + times.system + own

        before = cpu_s()
        await anyio.sleep(4)
        used = cpu_s() - before
        tasks.cancel_scope.cancel()
    assert used <= 0.02 + 0.005


async def test_r27_a_long_idle_engine_still_answers(tmp_path: Path) -> None:
    async with started(scripted_config(tmp_path)) as client:
        await anyio.sleep(1.2)  # past two looks at the parent
        client.add_request(request(1))
        assert len((await collect(client, 1))[1]) == 4
