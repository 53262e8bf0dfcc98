"""One engine without its process: scheduler and executor, stepped by whoever owns it. No I/O, no thread, no torch.

With overlap two steps are out at a time, so that the next one is there when the device is done with the oldest:

    launch 0 │ launch 1, wait for 0, update 0 │ launch 2, wait for 1, update 1 │ …

Used by one thread: the busy loop of :class:`EngineCoreProc`, or the caller of :class:`InprocClient`. Invariant: a
request's failure is an answer to that request; an exception out of :meth:`EngineCore.step` is the engine's end.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from asyncllm.core.request_clock import RequestClock
from asyncllm.core.scheduler import Scheduler
from asyncllm.errors import UsageError, UtilityError, describe_error, shown
from asyncllm.executor.base import Executor, ExecutorInfo, PendingStep, ReportProgress
from asyncllm.wire.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFinishReason,
    EngineInfo,
    FinishedRequest,
    FinishRequests,
    ParkRequests,
    PinPrefix,
    SchedulerStats,
    UnpinPrefixes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncllm.config import EngineConfig
    from asyncllm.structured.compiler import GrammarCompiler
    from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["UTILITIES", "EngineCore", "SchedulerInput"]

PROFILE_DIR = "asyncllm-profile"
"""Where trace files go by default, below the folder that the caller started the engine in."""

SLEEP_LEVELS = (1, 2)
"""1: the weights of a GPU go to the host, those of a CPU stay; 2: they are dropped and read from the disk again."""

SchedulerInput = EngineCoreRequest | AbortRequests | FinishRequests | ParkRequests | PinPrefix | UnpinPrefixes

UTILITIES = frozenset(
    {
        "check_health",
        "collective_rpc",
        "drain",
        "pause",
        "reset_prefix_cache",
        "resume",
        "sleep",
        "start_profile",
        "stats",
        "stop_profile",
        "wake_up",
    }
)
"""The methods of :class:`EngineCore` that the front end may call by name."""


class _FailedStep:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> ModelRunnerOutput:
        """Raise why."""
        raise self._error


class EngineCore:
    """A started engine.

    ``wake`` is called, on any thread, when :meth:`step` has something to do again without a new message.

    :raises ModelError: the checkpoint cannot be used.
    :raises InsufficientMemoryError: one request of ``max_model_len`` does not fit.
    :raises Exception: whatever else the executor raised; it is shut down then.
    """

    def __init__(self, config: EngineConfig, report: ReportProgress, wake: Callable[[], None] | None = None) -> None:
        self.config = config
        self.executor = Executor.get_class(config)(config, report)
        try:
            found = self.executor.start()
            config = config.with_block_size(found.block_size)
            self.scheduler = Scheduler(
                config,
                num_blocks=found.num_blocks,
                max_model_len=found.max_model_len,
                eos_token_ids=found.eos_token_ids,
                lookup_step_tokens=config.scheduler.lookup_step_tokens(found.device),
                lookup_free_tokens=config.scheduler.lookup_free_tokens(found.device),
            )
            self.max_steps_out = 2 if self.executor.overlaps_steps() else 1
            self.info = _engine_info(config, found, async_scheduling=self.max_steps_out > 1)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.executor.shutdown()
            raise
        self.clock = RequestClock()
        self._steps_out: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self._settled: deque[EngineCoreOutputs] = deque()  # of steps that a utility had to end
        self._refused: list[FinishedRequest] = []
        self._drains: list[Future[None]] = []
        self._grammars: GrammarCompiler | None = None  # from the first request on that has one
        self._wake = wake
        self._pauses: list[Future[None]] = []

    # -------------------------------------------------------------------------------------------- requests and steps
    def apply(self, message: SchedulerInput) -> None:
        """Take in what the front end wants of the scheduler; also while steps are out.

        A request that cannot be taken in is answered with reason ERROR; nothing else is harmed.
        """
        if isinstance(message, EngineCoreRequest):
            try:
                self.scheduler.add_request(message)
                self.clock.add(message.request_id)
                if message.sampling.grammar is not None and message.request_id in self.scheduler.requests:
                    self._compile(message)
            except Exception as error:  # whatever it is, only this request is wrong
                row = FinishedRequest(message.request_id, EngineFinishReason.ERROR, error=describe_error(error))
                self._refused.append(row)
        elif isinstance(message, AbortRequests):
            self.scheduler.abort_requests(message.request_ids)
            self.clock.drop(message.request_ids)
        elif isinstance(message, FinishRequests):
            self.scheduler.finish_requests(message.request_ids)
        elif isinstance(message, ParkRequests):
            self.scheduler.park_requests(message.request_ids, message.parked)
        elif isinstance(message, PinPrefix):
            self.scheduler.pin_prefix(message)
        else:
            self.scheduler.unpin_prefixes(message.pin_ids)

    def _compile(self, message: EngineCoreRequest) -> None:
        """Have the grammar of a request compiled on a thread; the request waits in the scheduler."""
        if self._grammars is None:
            from asyncllm.structured.compiler import GrammarCompiler

            info = self.info
            self._grammars = GrammarCompiler(
                self.config, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids, on_ready=self._wake
            )
        self._grammars.submit(message)

    def wait_for_grammar(self) -> bool:
        """Block until a grammar that requests wait for is compiled; ``False`` at once if there is none."""
        return self._grammars is not None and self._grammars.wait()

    def step(self, take_inputs: Callable[[], None] | None = None) -> EngineCoreOutputs | None:
        """Launch steps, end the oldest and return what it produced (possibly nothing yet).

        ``None`` if there was nothing to do, and no step is out. ``take_inputs`` is called after the forward, before its
        results are used and before the next step is scheduled: what is aborted while the forward runs gets no token of
        it.

        :raises Exception: the executor failed; the engine cannot go on.
        """
        if self._settled:
            return self._settled.popleft()
        if self._grammars is not None and self._grammars.has_ready:
            for request_id, matcher in self._grammars.take():
                self.scheduler.set_grammar(request_id, matcher)
        while len(self._steps_out) < self.max_steps_out and (scheduled := self.scheduler.schedule()) is not None:
            if scheduled.new_requests:
                self.clock.schedule(scheduled.new_requests)
            self._steps_out.append((scheduled, self._launch(scheduled)))
        outputs = self._end_oldest(take_inputs) if self._steps_out else self.scheduler.take_outputs()
        if outputs is not None:
            self.clock.stamp(outputs)
        if self._refused:
            outputs = outputs or EngineCoreOutputs(stats=self.scheduler.stats())
            outputs.finished += self._refused
            self._refused = []
        if not self._steps_out:
            self._answer_all(self._pauses)
            if not self.scheduler.has_unfinished():
                self._answer_all(self._drains)
        return outputs

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Launch a step; a failure is told in its turn, after what the steps that are out still produce."""
        try:
            return self.executor.execute_model(scheduled)
        except Exception as error:
            self.max_steps_out = 0  # nothing is launched after it
            return _FailedStep(error)

    def _end_oldest(self, take_inputs: Callable[[], None] | None = None) -> EngineCoreOutputs:
        scheduled, pending = self._steps_out[0]
        result = pending.result()  # one that failed stays: it is the engine's end whoever asked first
        self._steps_out.popleft()
        if take_inputs is not None:
            take_inputs()
        return self.scheduler.update_from_output(scheduled, result)

    def _settle(self) -> None:
        """End the steps that are out; what they produced is the next that :meth:`step` returns."""
        while self._steps_out:
            outputs = self._end_oldest()
            self.clock.stamp(outputs)
            self._settled.append(outputs)

    def has_work(self) -> bool:
        """Return whether :meth:`step` has something to do now."""
        has_grammar = self._grammars is not None and self._grammars.has_ready
        return bool(self._refused or self._steps_out or self._settled or has_grammar) or self.scheduler.has_work()

    def shutdown(self) -> None:
        """End the executor, after the steps that are out. Idempotent."""
        for waiting in (*self._drains, *self._pauses):
            waiting.cancel()
        self._drains.clear()
        self._pauses.clear()
        while self._steps_out:
            with contextlib.suppress(Exception):  # nobody waits for it any more
                self._steps_out.popleft()[1].result()
        if self._grammars is not None:
            self._grammars.shutdown()
        self.executor.shutdown()

    # --------------------------------------------------------------------------------------------------- utilities
    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a utility by name; a :class:`~concurrent.futures.Future` is an answer that comes later.

        :raises UtilityError: there is no such utility.
        :raises Exception: whatever it raised.
        """
        if method not in UTILITIES:
            raise UtilityError(f"the engine has no utility {method!r}; it has {sorted(UTILITIES)}", method=method)
        return getattr(self, method)(*args)

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters; what was sent before this call is in them."""
        return self.scheduler.stats()

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; ``False``, and nothing done, while requests hold blocks.

        ``reset_running``: preempt those first; they go on later.
        """
        return self.scheduler.reset_prefix_cache(reset_running)

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``method`` on every worker and return their values in rank order."""
        return self.executor.collective_rpc(method, args, kwargs)

    def start_profile(self, directory: str = PROFILE_DIR) -> None:
        """Have every worker record what it does, for a trace file in ``directory`` (made if it is not there).

        :raises UsageError: they record already.
        """
        self.executor.collective_rpc("start_profile", [os.path.abspath(directory)])

    def stop_profile(self) -> list[str]:
        """End the recording and return the paths of the trace files.

        :raises UsageError: nothing is being recorded.
        """
        paths: list[str] = []
        for found in self.executor.collective_rpc("stop_profile"):
            paths += [found] if isinstance(found, str) else found or []
        return paths

    def pause(self) -> Future[None]:
        """Run no step until :meth:`resume`; requests are kept and taken in. Answer once no step is out."""
        self.scheduler.paused = True
        return self._answer_when(not (self._steps_out or self._settled), self._pauses)

    def resume(self) -> None:
        """Run steps again."""
        self.scheduler.paused = False

    def sleep(self, level: int = 1) -> None:
        """Have the workers give their memory back and run no step until :meth:`wake_up`; requests are kept.

        Those that run are preempted: they go on later and compute everything again. Idempotent; a deeper level may
        follow.

        :raises UsageError: there is no such level.
        :raises InsufficientMemoryError: the host has no room for the weights of a GPU; nothing but the preemption and
            the loss of cached prefixes has happened.
        """
        if isinstance(level, bool) or level not in SLEEP_LEVELS:
            limit = " or ".join(map(str, SLEEP_LEVELS))
            raise UsageError(f"level is {shown(level)!r}; sleep() takes level {limit}")
        self._settle()
        if not self.scheduler.asleep:
            self.scheduler.reset_prefix_cache(reset_running=True)
        self.executor.collective_rpc("sleep", [int(level)])
        self.scheduler.fall_asleep()

    def wake_up(self) -> None:
        """Have the workers take their memory again, and go on. Idempotent.

        :raises Exception: a worker could not; the engine sleeps on, and this may be tried again.
        """
        if self.scheduler.asleep:
            self.executor.collective_rpc("wake_up")
            self.scheduler.asleep = False

    def drain(self) -> Future[None]:
        """Answer once no request is left and no step is out; paused, parked and sleeping requests count as well."""
        is_empty = not (self._steps_out or self._settled or self.scheduler.has_unfinished())
        return self._answer_when(is_empty, self._drains)

    def check_health(self) -> None:
        """Return if every worker lives.

        :raises EngineDeadError: one does not.
        """
        self.executor.check_health()

    @staticmethod
    def _answer_when(is_so: bool, waiting: list[Future[None]]) -> Future[None]:
        answer: Future[None] = Future()
        if is_so:
            answer.set_result(None)
        else:
            waiting.append(answer)
        return answer

    @staticmethod
    def _answer_all(waiting: list[Future[None]]) -> None:
        while waiting:
            waiting.pop(0).set_result(None)


def _engine_info(config: EngineConfig, found: ExecutorInfo, *, async_scheduling: bool) -> EngineInfo:
    return EngineInfo(
        max_model_len=found.max_model_len,
        vocab_size=found.vocab_size,
        eos_token_ids=list(found.eos_token_ids),
        block_size=found.block_size,
        num_blocks=found.num_blocks,
        kv_cache_bytes=found.kv_cache_bytes,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        device=found.device,
        dtype=found.dtype,
        attention_backend=found.attention_backend,
        pid=os.getpid(),
        phase_to_seconds=dict(found.phase_to_seconds),
        kernels=found.kernels,
        kv_cache_dtype=found.kv_cache_dtype,
        async_scheduling=async_scheduling,
        device_reason=found.device_reason,
        other_backends=dict(found.other_backends),
        graph_sizes=list(found.graph_sizes),
        memory_plan=dict(found.memory_plan),
        prompt_lookup_num_tokens=config.scheduler.prompt_lookup_num_tokens,
        prompt_lookup_step_tokens=config.scheduler.lookup_step_tokens(found.device),
    )
