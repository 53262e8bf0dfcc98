"""One worker in this process, called directly: the executor of a single device.

Where a step computes on the thread that launches it (on a CPU) and steps are to overlap, that thread is one of the
worker's own: the engine's loop then schedules, encodes and sends meanwhile. Invariant: one thread makes all calls of
the worker, in order.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from asyncllm import platforms
from asyncllm.config import AUTO
from asyncllm.errors import UsageError
from asyncllm.executor.base import Executor, ExecutorInfo, PendingStep, resolve_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput
    from asyncllm.worker.worker import Worker

__all__ = ["UniProcExecutor"]

T = TypeVar("T")


class UniProcExecutor(Executor):
    """Drives one worker: on the caller's thread, or on one of its own (see the module)."""

    _worker: Worker | None = None
    _thread: ThreadPoolExecutor | None = None
    _is_broken = False

    def start(self) -> ExecutorInfo:
        """Bring the worker up, phase by phase. Blocks until steps can run.

        :raises ConfigError: the device or the worker class cannot be used.
        :raises ModelError: the checkpoint cannot be used.
        :raises InsufficientMemoryError: one request of ``max_model_len`` does not fit.
        """
        if self.overlaps_steps() and not platforms.current(self.config).is_asynchronous:
            self._thread = ThreadPoolExecutor(1, "asyncllm-worker")
        return self._run(self._start)

    def _start(self) -> ExecutorInfo:
        phase_to_seconds: dict[str, float] = {}

        def run(phase: str, work: Callable[[], T]) -> T:
            self.report(phase, None)
            begin = time.monotonic()
            value = work()
            phase_to_seconds[phase] = time.monotonic() - begin
            return value

        worker = run("import_worker", self._make_worker)
        self._worker = worker
        run("init_device", worker.init_device)
        run("load_model", worker.load_model)
        plan = run("determine_num_blocks", worker.determine_num_blocks)
        run("allocate_kv_cache", lambda: worker.allocate_kv_cache(plan))
        run("warm_up", worker.warm_up)
        return ExecutorInfo(
            max_model_len=plan.max_model_len,
            vocab_size=worker.vocab_size,
            eos_token_ids=worker.eos_token_ids,
            block_size=worker.block_size,
            num_blocks=plan.num_blocks,
            kv_cache_bytes=(plan.num_blocks + 1) * worker.bytes_per_block,
            device=str(worker.device),
            dtype=str(worker.dtype).removeprefix("torch."),
            attention_backend=worker.attention_backend,
            kernels=worker.kernels,
            kv_cache_dtype=worker.kv_cache_dtype,
            device_reason=worker.platform.reason,
            other_backends=worker.other_backends,
            graph_sizes=worker.graph_sizes,
            memory_plan=worker.memory_plan,
            phase_to_seconds=phase_to_seconds,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Launch one step.

        :raises UsageError: the executor is not started, or shut down.
        """
        worker = self._started()
        if self._thread is None:
            return worker.execute_model(scheduler_output)
        return self._thread.submit(self._run_step, worker, scheduler_output)

    def _run_step(self, worker: Worker, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end, on the worker's thread; none after one that failed."""
        if self._is_broken:
            raise UsageError("a step before this one failed")
        self._is_broken = True
        output = worker.execute_model(scheduler_output).result()
        self._is_broken = False
        return output

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call the public ``method`` of the worker and return its value as a list of one.

        :raises AttributeError: the worker has no such public method.
        :raises Exception: whatever the worker raised.
        """
        worker = self._started()
        target = None if method.startswith("_") else getattr(worker, method, None)
        if not callable(target):
            raise AttributeError(f"{type(worker).__name__} has no method {method!r}")
        return [self._run(lambda: target(*args, **(kwargs or {})))]

    def check_health(self) -> None:
        """Return: a worker in this process lives as long as its caller does."""

    def shutdown(self) -> None:
        """Shut the worker down. Idempotent; also after a failed :meth:`start`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._run(worker.shutdown)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, called on the thread that makes all calls of the worker."""
        return work() if self._thread is None else self._thread.submit(work).result()

    def _make_worker(self) -> Worker:
        name = self.config.parallel.worker_cls
        if name == AUTO:
            name = platforms.current(self.config).worker_cls
        return resolve_class(name, parameter="worker_cls")(self.config, report=self.report)

    def _started(self) -> Worker:
        if self._worker is None:
            raise UsageError("the executor is not started, or shut down already")
        return self._worker
