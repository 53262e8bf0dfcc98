"""The stream of one request: a queue with one reader, and the handle that the user iterates.

:class:`StreamInbox` is what the output processor fills; :class:`TokenStream` is what the user holds. The engine's side
never holds the latter, so that dropping it is noticed.

Invariant: every way out of a stream - ``break``, an error in the body, cancellation of the task or of a scope, a
deadline, ``cancel()`` from elsewhere, dropping it - ends in :meth:`StreamInbox.discard` before anything can be
awaited. Nothing on these paths awaits: under a cancelled scope an await would itself be cancelled and the abort lost.

    pending ──admit──> running ──finish, fail──> ended          discard() leads from any state to discarded
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import anyio
import anyio.lowlevel
import msgspec

from asyncllm._event_loop import current_event_loop
from asyncllm.errors import AsyncLLMError, UsageError
from asyncllm.outputs import Completion, FinishReason, TokenDelta, Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
    from types import TracebackType
    from typing import Unpack

    from asyncllm._event_loop import EventLoop
    from asyncllm._request import BranchOptions
    from asyncllm.frontend.output_processor import RequestState
    from asyncllm.sampling_params import SamplingParams

__all__ = ["Branches", "StreamInbox", "StreamOwner", "TokenStream"]


class StreamPort(Protocol):
    """What an inbox needs of the running engine. Every method returns at once and may be called from any thread."""

    def abort(self, inbox: StreamInbox) -> None:
        """Drop the request of ``inbox``, here and in the engine."""

    def finish(self, inbox: StreamInbox) -> None:
        """Ask the engine to end the request of ``inbox`` softly."""

    def park(self, inbox: StreamInbox, parked: bool) -> None:
        """Leave the request of ``inbox`` out of steps, or take it in again."""


class StreamOwner(Protocol):
    """What a stream needs of the facade that made it, which it keeps alive."""

    def fork(
        self,
        source: TokenStream,
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        index: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Return streams that go on from where ``source`` is."""
        ...


class StreamInbox:
    """A queue with one reader: the sink of the output processor's items.

    ``put``, ``finish`` and ``fail`` are called in the thread of the event loop that the stream lives on.
    """

    __slots__ = (
        "__weakref__",
        "_high_water",
        "_low_water",
        "admission",
        "completion",
        "discarded",
        "ended",
        "error",
        "event_loop",
        "items",
        "num_samples",
        "parked",
        "port",
        "request",
        "request_id",
        "undelivered",
        "usage",
        "waiter",
    )

    def __init__(self, request_id: str, num_samples: int, max_buffered_tokens: int) -> None:
        self.request_id = request_id
        self.num_samples = num_samples
        self.items: deque[TokenDelta] = deque()
        self.waiter: Any = None
        self.admission: anyio.CancelScope | None = None  # while the reader waits for the request to be sent
        self.event_loop: EventLoop | None = None  # these three once it is sent
        self.port: StreamPort | None = None
        self.request: RequestState | None = None
        self.parked = False
        self.ended = False  # no further item will come
        self.error: BaseException | None = None
        self.completion: Completion | None = None
        self.usage: Usage | None = None  # once it is over
        self.discarded = False  # nothing is delivered any more …
        self.undelivered: list[TokenDelta] = []  # … not these either
        # A step or two are on their way when the engine is told to park, so it is told before the limit is reached.
        self._high_water = max(1, max_buffered_tokens * 3 // 4)
        self._low_water = max_buffered_tokens // 4

    @property
    def is_over(self) -> bool:
        """Whether the engine owes this stream nothing more."""
        return self.ended or self.discarded

    def bind(self, port: StreamPort, event_loop: EventLoop, request: RequestState) -> None:
        """Attach to the running engine, to the loop that the reader runs on, and to the registered request."""
        self.port = port
        self.event_loop = event_loop
        self.request = request

    # -------------------------------------------------------------------------------------- the output processor's side
    def put(self, delta: TokenDelta) -> None:
        """Hand one item to the reader."""
        if self.discarded:
            return
        self.items.append(delta)
        if self.waiter is not None and self.event_loop is not None:
            self.event_loop.wake(self)
        elif len(self.items) >= self._high_water and not self.parked and self.port is not None:
            self.parked = True
            self.port.park(self, True)

    def finish(self, completion: Completion) -> None:
        """Say that all items are there; after a discard the end is that one."""
        if not self.discarded:
            self.completion = completion
            self.usage = completion.usage
        self.ended = True
        self._wake()

    def fail(self, error: BaseException, usage: Usage) -> None:
        """End with ``error``, which the reader gets after the items that are there already."""
        if not self.discarded:
            self.usage = usage
        self.error = error
        self.ended = True
        self._wake()

    # ------------------------------------------------------------------------------------------------ the reader's side
    def take(self) -> TokenDelta:
        """Return the next item, which must be there; have the engine go on once a slow reader has caught up."""
        delta = self.items.popleft()
        if self.parked and len(self.items) <= self._low_water:
            self.parked = False
            if self.port is not None and not self.is_over:
                self.port.park(self, False)
        return delta

    def discard(self) -> None:
        """Deliver nothing more and have the engine drop the request. Any thread, idempotent, never awaits or raises."""
        if self.discarded:
            return
        is_owed = not self.ended
        if self.usage is None:
            self.usage = self._usage_now()
        self.discarded = True
        self.undelivered = list(self.items)
        self.items.clear()
        if is_owed and self.port is not None:
            self.port.abort(self)
        self._wake_anywhere()

    def end_unsent(self) -> None:
        """End a request that was never sent, as if it had been aborted before its first token. Any thread."""
        for index in range(self.num_samples):
            self.items.append(TokenDelta("", [], index, finish_reason=FinishReason.ABORT))
        self.usage = self._usage_now()
        self.ended = True
        self._wake_anywhere()

    def partial_completion(self) -> Completion:
        """Return what was delivered of a request that did not end by itself."""
        request, usage = self.request, self.usage or self._usage_now()
        if request is None:
            samples = [
                Completion(self.request_id, index, "", [], [], FinishReason.ABORT, None, usage)
                for index in range(self.num_samples)
            ]
        else:
            samples = [_without(sample.completion(usage), self.undelivered) for sample in request.samples]
        return msgspec.structs.replace(samples[0], samples=samples)

    def yielded_ids(self, index: int) -> list[int]:
        """Return the ids of a sample that the reader has taken; the request was sent."""
        assert self.request is not None
        sample = self.request.samples[index]
        waiting = sum(len(delta.token_ids) for delta in (*self.items, *self.undelivered) if delta.index == index)
        return sample.token_ids[: sample.num_put - waiting]

    def _usage_now(self) -> Usage:
        """Return what is known of the request's cost; nothing where it was not sent."""
        if self.request is None:
            return Usage(prompt_tokens=0, completion_tokens=0)
        return self.request.usage(time.perf_counter())

    def _wake_anywhere(self) -> None:
        """Wake the reader, if it waits, from any thread."""
        if self.event_loop is not None and (self.waiter is not None or self.admission is not None):
            if self.event_loop.is_current():
                self._wake()
            else:
                self.event_loop.run_soon(self._wake)

    def _wake(self) -> None:
        if self.waiter is not None and self.event_loop is not None:
            self.event_loop.wake(self)
        elif self.admission is not None:
            self.admission.cancel()


class TokenStream:
    """The tokens of one request as they come: an async iterator of :class:`asyncllm.TokenDelta`.

    Made by :meth:`asyncllm.AsyncLLM.stream` and :meth:`asyncllm.AsyncLLM.chat`. One task reads it; any task or thread
    may cancel it. Leaving it unfinished in any way aborts the request at once; only ``break`` while the stream is
    kept in a variable cannot be seen, so use ``async with`` there::

        async with llm.stream(prompt) as stream:
            async for token in stream:
                if enough(token):
                    break
    """

    __slots__ = ("__weakref__", "_admit", "_inbox", "_is_read", "_owner")

    def __init__(self, inbox: StreamInbox, admit: Callable[[], Awaitable[None]] | None, owner: StreamOwner) -> None:
        self._inbox = inbox
        self._admit = admit  # sends the request, where that could not be done at once
        self._owner = owner  # keeps the engine alive
        self._is_read = False

    @property
    def request_id(self) -> str:
        """The caller's id of this request, or the one that was made for it."""
        return self._inbox.request_id

    @property
    def usage(self) -> Usage | None:
        """What the request cost; ``None`` while it runs.

        Of a cancelled or failed stream, what was known here at that moment; the engine is not asked.
        """
        return self._inbox.usage

    def __aiter__(self) -> Self:
        return self

    def __await__(self) -> Generator[Any, Any, NoReturn]:
        self._refuse_use()

    def __iter__(self) -> NoReturn:
        self._refuse_use()

    def _refuse_use(self) -> NoReturn:
        self._inbox.discard()  # nobody will read it
        raise UsageError("this is a stream: iterate it with `async for`, or `await stream.completion()`")

    async def __anext__(self) -> TokenDelta:
        """Return the next item; cancelling this call aborts the request.

        :raises StopAsyncIteration: the request has ended, or was cancelled.
        :raises RequestError: the request is refused (found here where it could not be checked when it was made).
        :raises RequestFailedError: the engine failed on this request alone.
        :raises EngineDeadError: the engine is gone; items received before are delivered first.
        :raises UsageError: another task is reading this stream, or it belongs to another event loop.
        """
        inbox = self._inbox
        if not inbox.items or self._is_read:
            await self._wait_for_item()
        else:
            await self._stop_if_cancelled()
        return inbox.take()

    async def _wait_for_item(self) -> None:
        """Return once there is an item; on every other way out the request has been aborted."""
        self._check_reader()
        inbox = self._inbox
        self._is_read = True
        try:
            while not inbox.items:
                if inbox.discarded:
                    raise StopAsyncIteration
                if inbox.ended:
                    raise StopAsyncIteration if inbox.error is None else _fresh(inbox.error)
                if self._admit is not None:
                    await self._send(self._admit)
                elif inbox.event_loop is not None:
                    await inbox.event_loop.park(inbox)
        except StopAsyncIteration:
            raise
        except BaseException:
            inbox.waiter = None
            inbox.discard()
            raise
        finally:
            self._is_read = False

    async def _stop_if_cancelled(self) -> None:
        """Abort the request if the reader's scope is cancelled: one who always finds an item would never notice."""
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self._inbox.discard()
            raise

    async def _send(self, admit: Callable[[], Awaitable[None]]) -> None:
        """Have the request sent; ends early where the stream is cancelled or finished meanwhile."""
        inbox = self._inbox
        inbox.event_loop = current_event_loop()
        inbox.admission = anyio.CancelScope()
        try:
            with inbox.admission:
                await admit()
                self._admit = None
        finally:
            inbox.admission = None

    def _check_reader(self) -> None:
        if self._is_read:
            raise UsageError(f"stream {self.request_id!r} is being read by another task; a stream has one reader")
        loop = self._inbox.event_loop
        if loop is not None and not loop.is_current() and not self._inbox.is_over:
            raise UsageError(f"stream {self.request_id!r} belongs to another event loop")

    def cancel(self) -> None:
        """Abort the request now. Idempotent; from any task or thread, and harmless after the end.

        Nothing is delivered afterwards: a reader that waits ends as if the stream had ended.
        """
        self._inbox.discard()

    def finish(self) -> None:
        """End the request at its next token: held text, usage and the finish reason ``abort`` are still delivered.

        Idempotent; from any task or thread. Before the request was sent it is never sent.
        """
        inbox = self._inbox
        if inbox.is_over:
            return
        if inbox.port is not None:
            inbox.port.finish(inbox)
        else:
            inbox.end_unsent()

    def fork(
        self,
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        index: int = 0,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Return ``n`` streams that go on after the last token that this one has yielded, which goes on as well.

        Each is a request of its own whose prompt is the prompt and the output so far; see
        :meth:`asyncllm.AsyncLLM.fork`. ``index``: which sample, of a stream with several.

        :raises UsageError: the request of this stream was not sent yet.
        """
        return self._owner.fork(self, n, params, index=index, **sampling)

    @property
    def inbox(self) -> StreamInbox:
        """What the stream reads from; for this package."""
        return self._inbox

    async def aclose(self) -> None:
        """Abort the request if it has not ended; the same as :meth:`cancel`. Never suspends."""
        self._inbox.discard()

    async def completion(self) -> Completion:
        """Return the whole completion, waiting for what is still to come; what was read before is part of it.

        Of a cancelled stream it holds what was delivered, with finish reason ``abort``. Cancelling this call aborts the
        request. Raises what :meth:`__anext__` raises.
        """
        async for _ in self:
            pass
        inbox = self._inbox
        if inbox.completion is not None and not inbox.undelivered:
            return inbox.completion
        return inbox.partial_completion()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.discard()

    def __del__(self) -> None:
        # Runs on any thread and in the middle of anything, so everything that discard() does has to bear that.
        inbox: StreamInbox | None = getattr(self, "_inbox", None)
        if inbox is not None and not inbox.is_over:
            inbox.discard()

    def __repr__(self) -> str:
        inbox = self._inbox
        state = "discarded" if inbox.discarded else "ended" if inbox.ended else "running" if inbox.port else "pending"
        return f"<TokenStream {self.request_id!r} {state}>"


class Branches(list[TokenStream]):
    """The streams of a fork, in order; as ``async with`` block, leaving it aborts those that have not ended."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Abort all of them now. Idempotent; from any task or thread, and harmless after the end."""
        for stream in self:
            stream.cancel()


_NOT_ALL = "the stream was cancelled before all of it was delivered"


def _fresh(error: BaseException) -> BaseException:
    return error.fresh() if isinstance(error, AsyncLLMError) else error


def _without(completion: Completion, undelivered: Iterable[TokenDelta]) -> Completion:
    """Return ``completion`` up to the last item that was delivered."""
    missing = [delta for delta in undelivered if delta.index == completion.index]
    if not missing:
        return completion
    num_chars = sum(len(delta.text) for delta in missing)
    num_ids = sum(len(delta.token_ids) for delta in missing)
    return msgspec.structs.replace(
        completion,
        text=completion.text[: len(completion.text) - num_chars],
        token_ids=completion.token_ids[: len(completion.token_ids) - num_ids],
        logprobs=None if completion.logprobs is None else completion.logprobs[: len(completion.logprobs) - num_ids],
        finish_reason=FinishReason.ABORT,
        stop_reason=None,
        content=completion.content[: len(completion.content) - sum(len(delta.content) for delta in missing)],
        reasoning=_reasoning_without(completion.reasoning, missing),
        tool_calls=completion.tool_calls[: len(completion.tool_calls) - sum(map(_ends_call, missing))],
        invalid_tool_calls=completion.invalid_tool_calls[
            : len(completion.invalid_tool_calls) - sum(map(_ends_invalid_call, missing))
        ],
        parsed=None,
        parse_error=_NOT_ALL if completion.parsed is not None else completion.parse_error,
    )


def _reasoning_without(reasoning: str | None, missing: Iterable[TokenDelta]) -> str | None:
    if reasoning is None:
        return None
    return reasoning[: len(reasoning) - sum(len(delta.reasoning) for delta in missing)] or None


def _ends_call(delta: TokenDelta) -> bool:
    return delta.tool_call is not None and delta.tool_call.call is not None


def _ends_invalid_call(delta: TokenDelta) -> bool:
    return delta.tool_call is not None and delta.tool_call.invalid is not None
