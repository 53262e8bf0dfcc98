"""Which thread drives the worker, in which order, and what is left when it failed or was shut down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import UsageError
from asyncllm.executor.uniproc import UniProcExecutor
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput


class FakeWorker:
    """Notes the thread of every call; a step waits until its gate is open."""

    platform = SimpleNamespace(reason="")
    bytes_per_block = 1

    def __init__(self, config: EngineConfig, *, report: Any) -> None:
        self.threads = [threading.current_thread()]
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> str:
        return name  # whatever else the engine is told of a worker

    def note(self, name: str) -> None:
        self.threads.append(threading.current_thread())
        self.calls.append(name)

    def init_device(self) -> None:
        self.note("init_device")

    def load_model(self) -> None:
        self.note("load_model")

    def determine_num_blocks(self) -> SimpleNamespace:
        self.note("determine_num_blocks")
        return SimpleNamespace(max_model_len=10, num_blocks=4)

    def allocate_kv_cache(self, plan: object) -> None:
        self.note("allocate_kv_cache")

    def warm_up(self) -> None:
        self.note("warm_up")

    def execute_model(self, step: SchedulerOutput) -> Any:
        self.note(f"step {step.step_id}")
        assert self.gate.wait(10.0)
        if self.error is not None:
            raise self.error

        def result() -> ModelRunnerOutput:
            self.note(f"result {step.step_id}")
            return ModelRunnerOutput(step.step_id, [])

        return SimpleNamespace(result=result)

    def ask(self, value: str) -> str:
        self.note(value)
        return value

    def shutdown(self) -> None:
        self.note("shutdown")


def make(*, overlap: bool) -> tuple[UniProcExecutor, FakeWorker]:
    name = f"{__name__}.FakeWorker"
    config = EngineConfig.from_options("m", worker_cls=name, async_scheduling=overlap, device="cpu")
    executor = UniProcExecutor(config, lambda *_: None)
    executor.start()
    worker: Any = executor._worker
    return executor, worker


@pytest.fixture
def overlapped() -> Iterator[tuple[UniProcExecutor, FakeWorker]]:
    executor, worker = make(overlap=True)
    yield executor, worker
    worker.gate.set()
    executor.shutdown()


def a_step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(step_id, [0], [1], 1)


def test_without_overlap_all_is_done_on_the_callers_thread() -> None:
    executor, worker = make(overlap=False)
    worker.gate.set()
    assert executor.execute_model(a_step(0)).result().step_id == 0
    executor.shutdown()
    assert set(worker.threads) == {threading.current_thread()}


def test_with_overlap_one_other_thread_makes_all_calls_in_order(
    overlapped: tuple[UniProcExecutor, FakeWorker],
) -> None:
    executor, worker = overlapped
    del worker.calls[:]
    pending = [executor.execute_model(a_step(i)) for i in range(2)]  # neither waits
    worker.gate.set()
    assert executor.collective_rpc("ask", ["something"]) == ["something"]
    assert [one.result().step_id for one in pending] == [0, 1]
    executor.shutdown()
    assert worker.calls == ["step 0", "result 0", "step 1", "result 1", "something", "shutdown"]
    (thread,) = set(worker.threads)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_no_step_runs_after_one_that_failed(overlapped: tuple[UniProcExecutor, FakeWorker]) -> None:
    executor, worker = overlapped
    worker.error = RuntimeError("the device is gone")
    pending = [executor.execute_model(a_step(i)) for i in range(2)]
    worker.gate.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        pending[0].result()
    with pytest.raises(UsageError, match="before this one failed"):
        pending[1].result()
    assert "step 1" not in worker.calls


def test_an_error_while_starting_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeWorker) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(FakeWorker, "load_model", fail)
    config = EngineConfig.from_options("m", worker_cls=f"{__name__}.FakeWorker", async_scheduling=True, device="cpu")
    executor = UniProcExecutor(config, lambda *_: None)
    before = set(threading.enumerate())
    with pytest.raises(MemoryError, match="too large"):
        executor.start()
    executor.shutdown()
    executor.shutdown()
    assert set(threading.enumerate()) == before
