"""One worker in this process, called directly: the executor of a single device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from asyncllm import platforms
from asyncllm.config import AUTO
from asyncllm.errors import UsageError
from asyncllm.executor.base import Executor, ExecutorInfo, PendingStep, resolve_class

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncllm.wire.step import SchedulerOutput
    from asyncllm.worker.worker import Worker

__all__ = ["UniProcExecutor"]

T = TypeVar("T")


class UniProcExecutor(Executor):
    """Drives one worker on the caller's thread; a step's work is done when :meth:`execute_model` returns on a CPU."""

    _worker: Worker | None = None

    def start(self) -> ExecutorInfo:
        """Bring the worker up, phase by phase. Blocks until steps can run.

        :raises ConfigError: the device or the worker class cannot be used.
        :raises ModelError: the checkpoint cannot be used.
        :raises InsufficientMemoryError: one request of ``max_model_len`` does not fit.
        """
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
            phase_to_seconds=phase_to_seconds,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Launch one step.

        :raises UsageError: the executor is not started, or shut down.
        """
        return self._started().execute_model(scheduler_output)

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
        return [target(*args, **(kwargs or {}))]

    def check_health(self) -> None:
        """Return: a worker in this process lives as long as its caller does."""

    def shutdown(self) -> None:
        """Shut the worker down. Idempotent; also after a failed :meth:`start`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def _make_worker(self) -> Worker:
        name = self.config.parallel.worker_cls
        if name == AUTO:
            name = platforms.current(self.config).worker_cls
        return resolve_class(name, parameter="worker_cls")(self.config, report=self.report)

    def _started(self) -> Worker:
        if self._worker is None:
            raise UsageError("the executor is not started, or shut down already")
        return self._worker
