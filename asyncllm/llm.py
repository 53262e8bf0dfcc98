"""The synchronous face: prompts in, completions out, with a progress bar.

Thread-safe. Only one thread at a time talks to the engine; whoever waits for an answer takes a turn and does, in it,
what the others have left in ``_work``. So threads share batches, and none needs a thread of ours. Invariant: work is
done in the order in which it was left, between two steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from asyncllm._progress import make_bar
from asyncllm._request import ChatOptions, ChatRequest, PromptRequest, make_config, make_params
from asyncllm._sync_session import SyncSession
from asyncllm.errors import EngineDeadError, InvalidParameterError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Unpack

    from asyncllm._request import Message, SamplingOptions
    from asyncllm.config import EngineConfig
    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.outputs import Completion, TokenDelta, Usage
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.wire.messages import EngineInfo, SchedulerStats

__all__ = ["LLM"]

ENGINE_THREADS = "asyncllm-worker"
"""How the names of those threads begin that an engine in this process has (:mod:`asyncllm.executor.uniproc`)."""


class _Batch:
    """The requests of one call, and its progress bar."""

    def __init__(self, size: int, bar: Any) -> None:
        self.results: list[Completion | BaseException | None] = [None] * size
        self.num_left = size
        self.num_tokens = 0
        self.has_failed = False
        self.bar = bar

    def end(self, index: int, result: Completion | BaseException) -> None:
        if self.results[index] is not None:
            return
        self.results[index] = result
        self.num_left -= 1
        if isinstance(result, BaseException):
            self.has_failed = True
        else:
            self.num_tokens += result.usage.completion_tokens
        if self.bar is not None:
            self.bar.set_postfix_str(
                f"{self.num_tokens / max(self.bar.format_dict['elapsed'], 1e-9):.0f} tokens/s", False
            )
            self.bar.update()


class _BatchSink:
    """Brings one request's end to its batch; single tokens are of no interest here."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: _Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def put(self, delta: TokenDelta) -> None:
        pass

    def finish(self, completion: Completion) -> None:
        self._batch.end(self._index, completion)

    def fail(self, error: BaseException, usage: Usage) -> None:
        self._batch.end(self._index, error)


class LLM:
    """A model for synchronous code; the constructor starts the engine and blocks until it is ready.

    ``model`` and ``engine_options`` as for :class:`asyncllm.AsyncLLM`; ``in_process=True`` runs the engine in this
    process. Any number of threads may call it at once; their requests share the engine's steps. In a running event
    loop it works, but blocks that loop: use :class:`asyncllm.AsyncLLM` there. Close it, or leave the ``with`` block,
    to end the engine; it also ends with this process.

    :raises ConfigError: an option is unknown or out of range.
    :raises ModelError: the checkpoint cannot be used.
    :raises EngineStartError: the engine did not become ready.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        on_progress: Callable[[str, float | None], None] | None = None,
        **engine_options: Any,
    ) -> None:
        self.config = make_config(model, engine_options)
        self._session = SyncSession(self.config, on_progress)
        self._work: deque[Callable[[], None]] = deque()
        self._turn = threading.Condition()
        self._has_turn = False

    # --------------------------------------------------------------------------------------------------------- requests
    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        return_errors: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Return the completions of ``prompts``, in their order; a single prompt gives a list of one.

        ``params``: one for all, or one per prompt; or keywords (``max_tokens=32``). ``progress``: show a bar;
        ``None``: on a terminal. The first request that fails ends the call and aborts the others, unless
        ``return_errors``: then the error stands in the list. KeyboardInterrupt aborts all.

        :raises RequestError: a request is refused; nothing was sent.
        :raises RequestFailedError: the engine failed on a request.
        :raises EngineDeadError: the engine is gone.
        """
        many = _as_prompts(prompts)
        requests = [
            PromptRequest(prompt=prompt, params=given)
            for prompt, given in zip(many, _as_params(params, sampling, len(many)), strict=True)
        ]
        return self._answer(requests, progress, return_errors)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        progress: bool | None = None,
        return_errors: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> list[Completion]:
        """Return the answers to one conversation or several, in their order.

        The arguments of a chat are those of :meth:`asyncllm.AsyncLLM.chat`, all else is as for :meth:`generate`.
        """
        many = _as_conversations(messages)
        options = ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        requests = [
            ChatRequest(messages=one, params=given, options=options)
            for one, given in zip(many, _as_params(params, sampling, len(many)), strict=True)
        ]
        return self._answer(requests, progress, return_errors)

    def _answer(
        self, requests: Sequence[PromptRequest | ChatRequest], progress: bool | None, return_errors: bool
    ) -> list[Completion]:
        self._session.check()
        processed = [request.process(self._session.inputs, None) for request in requests]
        bar = make_bar(len(processed), progress)
        batch = _Batch(len(processed), bar)
        try:
            self._do_soon(lambda: self._submit(processed, batch))
            self._drive(lambda: batch.num_left == 0 or (not return_errors and batch.has_failed))
        finally:
            if batch.num_left:
                self._do_soon(lambda: self._abort(processed))
                self._work_if_free()
            if bar is not None:
                bar.close()
        if not return_errors:
            for result in batch.results:
                if isinstance(result, BaseException):
                    raise result
        return cast("list[Completion]", batch.results)

    def _submit(self, processed: Sequence[ProcessedRequest], batch: _Batch) -> None:
        for index, request in enumerate(processed):
            try:
                self._session.submit(request, _BatchSink(batch, index))
            except Exception as error:
                batch.end(index, error)

    def _abort(self, processed: Sequence[ProcessedRequest]) -> None:
        for request in processed:
            self._session.abort(request.request_id, deliver=False)

    # ----------------------------------------------------------------------------------------------------- taking turns
    def _do_soon(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def _drive(self, is_done: Callable[[], bool]) -> None:
        """Step the engine, in turn with other threads, until ``is_done``.

        While the engine sleeps nobody takes a turn but to do what was left in ``_work``; waking it up is such a thing.

        :raises UsageError: the engine sleeps, and there is no other thread to wake it up.
        """
        while True:
            with self._turn:
                while not is_done() and (self._has_turn or self._must_sleep()):
                    self._turn.wait()
                if is_done():
                    return
                self._has_turn = True
            try:
                self._do_work()
                if not is_done() and not self._session.is_sleeping:
                    self._step()
            finally:
                self._end_turn()

    def _must_sleep(self) -> bool:
        if not self._session.is_sleeping or self._work:
            return False
        if not any(_may_call(thread) for thread in threading.enumerate()):
            raise UsageError("the engine sleeps, and no other thread could wake it up; call wake_up() first")
        return True

    def _step(self) -> None:
        with contextlib.suppress(EngineDeadError):  # every sink was told, and what comes later is refused
            self._session.step()

    def _do_work(self) -> None:
        while self._work:
            self._work.popleft()()

    def _work_if_free(self) -> None:
        """Do the work now unless another thread has the turn, which then does it."""
        with self._turn:
            if self._has_turn:
                return
            self._has_turn = True
        try:
            self._do_work()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._turn:
            self._has_turn = False
            self._turn.notify_all()

    # ------------------------------------------------------------------------------------------------------- the engine
    def _call(self, method: str, *args: Any) -> Any:
        return self._do_now(lambda: self._session.call(method, *args))

    def _do_now(self, work: Callable[[], Any]) -> Any:
        """Return what ``work`` returns, once it is its turn."""
        answer: list[Any] = []
        failed: list[BaseException] = []

        def call() -> None:
            try:
                answer.append(work())
            except Exception as error:
                failed.append(error)

        self._do_soon(call)
        self._drive(lambda: bool(answer or failed))
        if failed:
            raise failed[0]
        return answer[0]

    def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters."""
        return self._call("stats")

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; ``False``, and nothing done, while requests hold blocks."""
        return self._call("reset_prefix_cache", reset_running)

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method`` on every worker between two steps and return their values in rank order. Plain data only."""
        return self._call("collective_rpc", method, list(args), kwargs)

    def start_profile(self, directory: str | os.PathLike[str] = "asyncllm-profile") -> None:
        """Begin to record what the workers do; :meth:`stop_profile` writes the traces into ``directory``."""
        self._call("start_profile", os.path.abspath(directory))

    def stop_profile(self) -> list[str]:
        """Stop recording and return the paths of the trace files, one per worker."""
        return self._call("stop_profile")

    def sleep(self, level: int = 1) -> None:
        """Give the engine's memory back until :meth:`wake_up`; see :meth:`asyncllm.AsyncLLM.sleep`.

        Calls of other threads wait until a thread wakes it up; where there is no other thread, they raise UsageError.
        """
        self._do_now(lambda: self._session.sleep(level))

    def wake_up(self) -> None:
        """Go on after :meth:`sleep`; see :meth:`asyncllm.AsyncLLM.wake_up`."""
        self._do_now(self._session.wake_up)

    @property
    def info(self) -> EngineInfo:
        """What the engine found out while it started."""
        return self._session.client.info

    def close(self) -> None:
        """End the engine and leave nothing behind; calls of other threads end with what they have. Idempotent."""
        if not self._session.is_closed:
            self._do_soon(self._session.close)  # a thread that has the turn does it before its next step
            self._drive(lambda: self._session.is_closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_prompts(prompts: Any) -> list[str | Sequence[int]]:
    """Return a list of prompts for one prompt (a text, or ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidParameterError(f"prompts is a {type(prompts).__name__}; it must be a prompt or a list of prompts")
    many = cast("Sequence[Any]", prompts)
    return [many] if len(many) and not isinstance(many[0], (str, Sequence)) else list(many)


def _may_call(thread: threading.Thread) -> bool:
    """Return whether ``thread`` is another one than this, an engine's in this process, and the one of progress bars."""
    if thread is threading.current_thread() or type(thread).__module__ == "tqdm._monitor":
        return False
    return not thread.name.startswith(ENGINE_THREADS)


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence):
        raise InvalidParameterError(f"messages is a {type(messages).__name__}; it must be a list of messages")
    many = cast("Sequence[Any]", messages)
    return [many] if len(many) and isinstance(many[0], Mapping) else list(many)


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, sampling: SamplingOptions, count: int
) -> list[SamplingParams]:
    if isinstance(params, Sequence):
        if sampling:
            raise TypeError(f"give params or the keywords {sorted(sampling)}, not both")
        if len(params) != count:
            raise InvalidParameterError(
                f"params has {len(params)} entries for {count} prompts",
                parameter="params",
                value=len(params),
                limit=count,
            )
        return list(params)
    return [make_params(params, sampling)] * count
