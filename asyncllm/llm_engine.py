"""The synchronous engine, one step at a time: for callers that bring their own loop.

Not thread-safe: one thread at a time; :class:`asyncllm.LLM` is the face for several. Invariant: every request that was
added ends in exactly one :class:`RequestOutput` with a completion or an error, unless it was aborted without asking for
that; its id is free again from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec

from asyncllm._request import ChatOptions, ChatRequest, PromptRequest, make_config, make_params
from asyncllm._sync_session import SyncSession
from asyncllm.errors import UsageError
from asyncllm.outputs import Completion, TokenDelta, Usage

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Unpack

    from asyncllm._request import Message, SamplingOptions
    from asyncllm.config import EngineConfig
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.wire.messages import EngineInfo, SchedulerStats

__all__ = ["LLMEngine", "RequestOutput"]


class RequestOutput(msgspec.Struct):
    """What one step brought for one request; its last one carries ``completion`` or ``error``, and ``usage``."""

    request_id: str
    deltas: list[TokenDelta]
    completion: Completion | None = None
    error: BaseException | None = None
    usage: Usage | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.completion is not None or self.error is not None


class _StepSink:
    """Notes what the sinks of all requests got since the last step."""

    __slots__ = ("_request_id", "_request_id_to_output")

    def __init__(self, request_id: str, request_id_to_output: dict[str, RequestOutput]) -> None:
        self._request_id = request_id
        self._request_id_to_output = request_id_to_output

    def put(self, delta: TokenDelta) -> None:
        self._output().deltas.append(delta)

    def finish(self, completion: Completion) -> None:
        output = self._output()
        output.completion, output.usage = completion, completion.usage

    def fail(self, error: BaseException, usage: Usage) -> None:
        output = self._output()
        output.error, output.usage = error, usage

    def _output(self) -> RequestOutput:
        output = self._request_id_to_output.get(self._request_id)
        if output is None:
            output = self._request_id_to_output[self._request_id] = RequestOutput(self._request_id, [])
        return output


class LLMEngine:
    """Add requests, call :meth:`step` until :meth:`has_unfinished_requests` is false.

    ``model`` and ``engine_options`` as for :class:`asyncllm.AsyncLLM`; ``in_process=True`` runs the engine in this
    process. The constructor starts the engine and blocks until it is ready.

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
        self._request_id_to_output: dict[str, RequestOutput] = {}
        self._session = SyncSession(self.config, on_progress)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """Send a request and return its id; arguments as for :meth:`asyncllm.AsyncLLM.stream`.

        :raises RequestError: the request is refused; nothing was sent.
        :raises EngineDeadError: the engine is gone.
        """
        request = PromptRequest(
            prompt=prompt, params=make_params(params, sampling), priority=priority, cache_salt=cache_salt
        )
        return self._add(request, request_id)

    def add_chat_request(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> str:
        """Send a request whose prompt the chat template makes of ``messages``, and return its id.

        The arguments of a chat are those of :meth:`asyncllm.AsyncLLM.chat`, all else is as for :meth:`add_request`.
        """
        request = ChatRequest(
            messages=messages,
            options=ChatOptions(
                tools=tools,
                tool_choice=tool_choice,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
            ),
            params=make_params(params, sampling),
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._add(request, request_id)

    def _add(self, request: PromptRequest | ChatRequest, request_id: str | None) -> str:
        processed = request.process(self._session.inputs, request_id)
        self._session.submit(processed, _StepSink(processed.request_id, self._request_id_to_output))
        return processed.request_id

    def step(self) -> list[RequestOutput]:
        """Wait for the next step and return what it changed, one entry per request; at once if there is nothing to do.

        What :meth:`abort_request` delivered since the last call is part of it. In the caller's own process
        (``in_process``) this runs the step.

        :raises EngineDeadError: the engine is gone, and all that happened before was returned.
        :raises UsageError: the engine sleeps, and requests wait for :meth:`wake_up`.
        """
        changed = self._request_id_to_output
        if self._session.is_sleeping:
            self._session.take_arrived()
            if not changed and self._session.outputs.num_unfinished:
                raise UsageError("the engine sleeps; no step comes before wake_up()")
        elif not changed:
            try:
                self._session.step()
            except Exception:
                if not changed:
                    raise
        outputs = list(changed.values())
        changed.clear()
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next :meth:`step` returns their partial completions. Ids that do not live are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._session.abort(request_id, deliver=True)

    def has_unfinished_requests(self) -> bool:
        """Return whether :meth:`step` has something to wait for or to return."""
        return bool(self._request_id_to_output) or self._session.outputs.num_unfinished > 0

    # ------------------------------------------------------------------------------------------------------- the engine
    def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters."""
        return self._session.call("stats")

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; ``False``, and nothing done, while requests hold blocks."""
        return self._session.call("reset_prefix_cache", reset_running)

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method`` on every worker and return their values in rank order. Plain data only."""
        return self._session.call("collective_rpc", method, list(args), kwargs)

    def sleep(self, level: int = 1) -> None:
        """Give the engine's memory back until :meth:`wake_up`; see :meth:`asyncllm.AsyncLLM.sleep`.

        What the last steps brought is returned by :meth:`step` first.
        """
        self._session.sleep(level)

    def wake_up(self) -> None:
        """Go on after :meth:`sleep`; see :meth:`asyncllm.AsyncLLM.wake_up`."""
        self._session.wake_up()

    @property
    def info(self) -> EngineInfo:
        """What the engine found out while it started."""
        return self._session.client.info

    def close(self) -> None:
        """End the engine and leave nothing behind. Idempotent."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
