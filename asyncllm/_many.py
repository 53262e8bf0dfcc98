"""Many prompts through one engine, a bounded number at a time: what stands behind ``map`` and ``as_completed``.

One task feeds prompts; no task waits for a single request: the end of each is noted by its inbox, in the reader's turn.
The object that the caller iterates over is apart from the state that the task holds, so dropping it ends everything.

    prompt ──room──► in flight ──► done ──► yielded        at most max_in_flight are in flight, and at most
                                                           MAX_AHEAD times as many are in flight or done
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncllm._event_loop import current_event_loop
from asyncllm.errors import AsyncLLMError, InvalidParameterError, UsageError
from asyncllm.token_stream import StreamInbox

if TYPE_CHECKING:
    from types import TracebackType

    from asyncllm._event_loop import EventLoop
    from asyncllm._request import ChatRequest, PromptRequest, RequestPath
    from asyncllm.outputs import Completion, TokenDelta, Usage

__all__ = ["Batch", "Completions"]

MAX_AHEAD = 4
"""A slow reader, or a slow first prompt of ``map``, holds the others up once so many times ``max_in_flight`` wait."""
CLOSE_TIMEOUT_S = 1.0
"""How long an async generator of prompts may take to end where not all were taken."""

T = TypeVar("T")
Prompts = Iterable[Any] | AsyncIterable[Any]


class Gate:
    """Where one task waits until it is woken."""

    __slots__ = ("waiter",)

    def __init__(self) -> None:
        self.waiter: Any = None

    async def wait(self, loop: EventLoop) -> None:
        """Return once somebody woke it."""
        try:
            await loop.park(self)
        except BaseException:
            self.waiter = None
            raise


class BatchInbox(StreamInbox):
    """The inbox of a request whose tokens nobody reads one by one."""

    __slots__ = ("batch", "number")

    batch: Batch
    number: int

    def put(self, delta: TokenDelta) -> None:
        """Let the item go: the completion has it."""

    def finish(self, completion: Completion) -> None:
        """Note the end."""
        super().finish(completion)
        self.batch.note(self)

    def fail(self, error: BaseException, usage: Usage) -> None:
        """Note the failure."""
        super().fail(error, usage)
        self.batch.note(self)

    def end_unsent(self) -> None:
        """Note the end of a request that was not sent."""
        super().end_unsent()
        self.batch.note(self)


class Batch:
    """The prompts of one call, those in flight, and what is done. In its event loop but for ``cancel``."""

    def __init__(
        self,
        path: RequestPath,
        prompts: Prompts,
        make_request: Callable[[Any], PromptRequest | ChatRequest],
        *,
        max_in_flight: int,
        progress: bool | None,
    ) -> None:
        if not isinstance(prompts, (AsyncIterable, Iterable)) or isinstance(prompts, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidParameterError(
                f"prompts is a {type(prompts).__name__}; it must be an iterable of prompts, async or not",
                parameter="prompts",
                value=type(prompts).__name__,
                limit="an iterable of prompts",
            )
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.is_left = False
        self.done: deque[tuple[int, Completion]] = deque()
        self._path = path
        self._prompts = prompts
        self._make_request = make_request
        self._max_in_flight = max_in_flight
        self._progress = progress
        self._bar: Any = None
        self._num_tokens = 0
        self._began = 0.0
        self._num_waiting = 0  # done, not yet yielded
        self._inboxes: dict[int, StreamInbox] = {}  # in flight
        self._is_fed = False
        self._loop: EventLoop | None = None
        self._task: object = None
        self._scope = anyio.CancelScope()
        self._room, self._news = Gate(), Gate()

    # ------------------------------------------------------------------------------------------------ the reader's side
    def start(self) -> None:
        """Begin to feed, on the running event loop.

        :raises UsageError: it runs on another one.
        """
        if self._loop is None:
            self._loop = current_event_loop()
            self._task = self._loop.spawn(self._run, "asyncllm prompts")
        elif not self._loop.is_current():
            raise UsageError("these completions belong to another event loop")

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be done."""
        return self.is_cancelled or (self._is_fed and not self._inboxes)

    async def wait(self) -> None:
        """Return once something has changed."""
        assert self._loop is not None
        if self._news.waiter is not None:
            raise UsageError("these completions are being read by another task")
        await self._news.wait(self._loop)

    def taken(self) -> None:
        """Note that the reader got one."""
        self._num_waiting -= 1
        self._wake(self._room)

    def leave(self) -> None:
        """Yield nothing more, and :meth:`cancel`. Idempotent, any thread, never awaits."""
        self.is_left = True
        self.cancel()

    def cancel(self) -> None:
        """Abort what is in flight and take no more prompts. Idempotent, any thread, never awaits."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        for inbox in list(self._inboxes.values()):
            inbox.discard()
        self._inboxes.clear()
        loop = self._loop
        if loop is None:
            return
        if loop.is_current():
            self._stop()
        else:
            loop.run_soon(self._stop)

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is over
            self._scope.cancel()
        self._close_bar()
        self._wake(self._news)

    # ------------------------------------------------------------------------------------------- the ends of requests
    def note(self, inbox: BatchInbox) -> None:
        """Take the end of a request."""
        if self._inboxes.pop(inbox.number, None) is None:
            return
        if inbox.error is not None:
            self._fail(inbox.error.fresh() if isinstance(inbox.error, AsyncLLMError) else inbox.error)
            return
        completion = inbox.completion or inbox.partial_completion()
        self.done.append((inbox.number, completion))
        self._num_waiting += 1
        self._show(completion)
        self._wake(self._room)
        self._wake(self._news)

    def _fail(self, error: BaseException) -> None:
        if self.error is None and not self.is_cancelled:
            self.error = error
        self.cancel()

    def _wake(self, gate: Gate) -> None:
        if gate.waiter is not None and self._loop is not None:
            self._loop.wake(gate)

    # ------------------------------------------------------------------------------------------------------- the feeder
    async def _run(self) -> None:
        try:
            with self._scope:
                await self._feed()
        except Exception as error:
            self._fail(error)
        self._is_fed = True
        if not self._inboxes:
            self._close_bar()
        self._wake(self._news)

    async def _feed(self) -> None:
        assert self._loop is not None
        if self._progress is not False:
            await self._make_bar()
        number = 0
        async with _items(self._prompts) as items:
            while not self.is_cancelled:
                while not self._has_room():
                    await self._room.wait(self._loop)
                try:
                    prompt = await anext(items)
                except StopAsyncIteration:
                    return
                await self._send(number, self._make_request(prompt))
                number += 1

    def _has_room(self) -> bool:
        num_running = len(self._inboxes)
        return num_running < self._max_in_flight and num_running + self._num_waiting < MAX_AHEAD * self._max_in_flight

    async def _send(self, number: int, request: PromptRequest | ChatRequest) -> None:
        inbox = self._path.claim(None, request.params.n, BatchInbox)
        assert isinstance(inbox, BatchInbox)
        inbox.batch, inbox.number = self, number
        self._inboxes[number] = inbox
        if self.is_cancelled:
            inbox.discard()
        try:
            await self._path.admit(request, inbox)
        except BaseException:
            inbox.discard()
            self._inboxes.pop(number, None)
            raise

    # ------------------------------------------------------------------------------------------------- the progress bar
    async def _make_bar(self) -> None:
        from asyncllm._progress import make_bar  # imports tqdm, which takes some 50 ms

        total = len(self._prompts) if isinstance(self._prompts, Sized) else None
        self._bar = await anyio.to_thread.run_sync(make_bar, total, self._progress, abandon_on_cancel=True)
        self._began = time.perf_counter()

    def _show(self, completion: Completion) -> None:
        if self._bar is None:
            return
        self._num_tokens += completion.usage.completion_tokens
        rate = self._num_tokens / max(time.perf_counter() - self._began, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", False)
        self._bar.update()
        if self.is_over:
            self._close_bar()

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class Completions(Generic[T]):
    """What ``map`` and ``as_completed`` return: an async iterator, also for ``async with``. One task reads it.

    Leaving it in any way, or an error, aborts what is in flight at once; only ``break`` while it is kept in a variable
    cannot be seen, so use ``async with`` there.
    """

    __slots__ = ("__weakref__", "_batch", "_take")

    def __init__(self, batch: Batch, take: Callable[[Batch], T | None]) -> None:
        self._batch = batch
        self._take = take

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next one; cancelling this call aborts all that is in flight.

        :raises StopAsyncIteration: there is no further prompt, or it was left.
        :raises RequestError: a prompt is refused; what was done before is yielded first, the rest is aborted.
        :raises RequestFailedError: the engine failed on one of them; likewise.
        :raises EngineDeadError: the engine is gone; likewise.
        :raises Exception: what the iterable of prompts raised; likewise.
        :raises UsageError: another task reads it, or it belongs to another event loop.
        """
        batch = self._batch
        try:
            batch.start()
            await anyio.lowlevel.checkpoint_if_cancelled()
            if batch.is_left:
                raise StopAsyncIteration
            while (item := self._take(batch)) is None:
                if batch.error is not None:
                    error, batch.error = batch.error, None
                    raise error
                if batch.is_over:
                    break
                await batch.wait()
        except BaseException:
            batch.leave()
            raise
        if item is None:
            raise StopAsyncIteration
        batch.taken()
        return item

    async def aclose(self) -> None:
        """Abort what is in flight and take no more prompts. Idempotent; never suspends."""
        self._batch.leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._batch.leave()

    def __del__(self) -> None:
        batch: Batch | None = getattr(self, "_batch", None)
        if batch is not None:
            batch.leave()


def take_any(batch: Batch) -> tuple[int, Completion] | None:
    """Return what was done first, with the number of its prompt."""
    return batch.done.popleft() if batch.done else None


class InOrder:
    """Takes completions in the order of the prompts."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Completion] = {}

    def __call__(self, batch: Batch) -> Completion | None:
        """Return the completion of the next prompt, if it is there."""
        while batch.done:
            number, completion = batch.done.popleft()
            self._waiting[number] = completion
        found = self._waiting.pop(self._next, None)
        if found is not None:
            self._next += 1
        return found


@contextlib.asynccontextmanager
async def _items(prompts: Prompts) -> AsyncGenerator[AsyncIterator[Any]]:
    """Yield an async iterator over ``prompts``; an async generator that was not taken to its end is closed."""
    if not isinstance(prompts, AsyncIterable):
        yield _in_turn(iter(prompts))
        return
    items = aiter(prompts)
    try:
        yield items
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await close()


class _in_turn:  # noqa: N801 - a function but for its needing no end
    """An async iterator over an iterator."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        raise StopAsyncIteration
