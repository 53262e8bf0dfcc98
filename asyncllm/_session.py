"""One running engine as the async facade sees it: its client, the two processors, and the task that reads.

Everything but :meth:`Session.call`, :meth:`Session.drain` and :meth:`Session.aclose` is plain synchronous code that
never waits, so it may stand on any cancellation path. The reader task is nobody's child: cancelling a consumer cannot
end it, the end of its event loop does, and a later event loop gets a new one.

Invariants: a request is in the output processor's table and in the engine, or in neither; one task reads the client;
once the engine's death is known, every stream has been told and every later call raises.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import anyio

from asyncllm._event_loop import current_event_loop
from asyncllm.errors import AsyncLLMError, EngineDeadError, RequestTooLargeError, UsageError

if TYPE_CHECKING:
    from asyncllm._event_loop import EventLoop
    from asyncllm.client.async_mp import AsyncMPClient
    from asyncllm.frontend.input_processor import InputProcessor, ProcessedRequest
    from asyncllm.frontend.output_processor import OutputProcessor
    from asyncllm.token_stream import StreamInbox
    from asyncllm.wire.messages import PinPrefix

__all__ = ["Session"]

logger = logging.getLogger("asyncllm")

MAX_BURST_S = 0.005
"""How long requests that are checked and sent in the loop may keep its other tasks waiting."""


class Pace:
    """Spreads a burst of requests over time: half of it goes to them, half to the other tasks of the loop.

    A bucket: what was spent leaks out at half the speed of the clock, and who finds more than ``MAX_BURST_S`` in it
    waits. Without it a thousand ``generate`` calls gathered at once are tokenized in a single turn of the loop.
    """

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._at = 0.0
        self._gate = anyio.Lock()

    def spend(self, began: float) -> None:
        """Note that a request took from ``began`` (by ``time.perf_counter``) until now."""
        now = time.perf_counter()
        self._spent_s = max(0.0, self._spent_s - (began - self._at) / 2) + now - began
        self._at = now

    async def wait(self) -> None:
        """Wait for a turn; returns at once outside of bursts."""
        if self._spent_s <= MAX_BURST_S and not self._gate.locked():
            return
        async with self._gate:
            too_much_s = self._spent_s - (time.perf_counter() - self._at) / 2 - MAX_BURST_S
            if too_much_s > 0:
                await anyio.sleep(2 * too_much_s)


class Session:
    """A started engine. Methods belong to the thread of :attr:`event_loop` unless they say otherwise."""

    def __init__(
        self,
        client: AsyncMPClient,
        inputs: InputProcessor,
        outputs: OutputProcessor,
    ) -> None:
        self.client = client
        self.inputs = inputs
        self.outputs = outputs
        self.event_loop: EventLoop | None = None
        self.death: EngineDeadError | None = None
        self.is_closed = False
        self._closed: anyio.Event | None = None  # set once nothing is left of a closed engine
        self._reader: _Reader | None = None
        self.pace = Pace()
        self._pin_to_num_blocks: dict[int, int] = {}
        self._idle: anyio.Event | None = None  # set when the table gets empty, while somebody drains

    # --------------------------------------------------------------------------------------------- the loop it lives on
    def bind(self) -> EventLoop:
        """Return the running event loop; the reader task runs on it from now on.

        :raises UsageError: no event loop runs here, or this engine is in use on another one that still runs.
        """
        loop = self.event_loop
        if loop is not None and self._reader is not None:
            if loop.is_current():
                return loop
            if loop.is_alive():
                raise UsageError(
                    "this AsyncLLM is in use on another event loop that is still running; "
                    "use it from that loop only, or make one AsyncLLM per loop"
                )
            self._reader.cancel()
            self._leave_loop()
        loop = self.event_loop = current_event_loop()
        self.pace = Pace()
        if self.death is None and not self.is_closed:
            self._reader = _Reader(self, loop)
        return loop

    @property
    def is_bound_here(self) -> bool:
        """Whether a request can be sent right now: the engine lives and its reader runs on the current event loop."""
        loop = self.event_loop
        return (
            self.death is None
            and not self.is_closed
            and self._reader is not None
            and loop is not None
            and (loop.is_current())
        )

    def forget_reader(self, reader: _Reader) -> None:
        """Note that ``reader`` has ended; called by itself."""
        if self._reader is reader:
            self._leave_loop()

    def _leave_loop(self) -> None:
        """Drop the requests of a loop that is over; nobody can read them any more."""
        self._reader = None
        if not self.is_closed and self.death is None:
            self._fail_all(UsageError("the event loop of this stream has ended"))

    # --------------------------------------------------------------------------------------------------------- requests
    def check(self) -> None:
        """Return if the engine can be used.

        :raises EngineDeadError: it has died.
        :raises UsageError: it was closed, or this process is a fork of the one that started it.
        """
        if self.death is not None:
            raise self.death.fresh()
        if self.is_closed:
            raise UsageError("this AsyncLLM is closed")
        self.client.check_owner()

    def submit(self, processed: ProcessedRequest, inbox: StreamInbox) -> None:
        """Register the request and send it; all of it or nothing, with no await in between.

        :raises EngineDeadError: the engine is gone.
        :raises OverflowError: a number in it does not fit 64 bits.
        """
        self.check()
        assert self.event_loop is not None
        state = self.outputs.add_request(processed, inbox)
        try:
            for request in processed.requests:
                self.client.add_request(request)
        except BaseException:
            self.client.abort_requests(self.outputs.abort(state, deliver=False))
            raise
        inbox.bind(self, self.event_loop, state)

    def abort(self, inbox: StreamInbox) -> None:
        """Drop the requests of ``inbox`` here and in the engine. Any thread, also from ``__del__``."""
        if inbox.request is not None:
            self.client.abort_requests(self.outputs.abort(inbox.request, deliver=False))
            self._note_idle()

    def finish(self, inbox: StreamInbox) -> None:
        """Have the engine end the requests of ``inbox`` and answer with what is left. Any thread."""
        if inbox.request is not None:
            self.client.finish_requests(inbox.request.live_engine_ids)

    def park(self, inbox: StreamInbox, parked: bool) -> None:
        """Leave the requests of ``inbox`` out of steps, or take them in again. Any thread."""
        if inbox.request is not None:
            self.client.park_requests(inbox.request.live_engine_ids, parked)

    def pin(self, pin: PinPrefix, max_fraction: float) -> None:
        """Have the engine keep the blocks of a prefix, if it pins at most ``max_fraction`` of its blocks then.

        :raises RequestTooLargeError: with those that are pinned already they are more than may be.
        """
        info = self.client.info
        num_blocks, limit = -(-len(pin.token_ids) // info.block_size), int(info.num_blocks * max_fraction)
        num_pinned = sum(self._pin_to_num_blocks.values())
        if num_pinned + num_blocks > limit:
            raise RequestTooLargeError(
                f"the prefix of {len(pin.token_ids)} tokens takes {num_blocks} KV blocks; {limit} of the engine's "
                f"{info.num_blocks} may be pinned (max_pinned_fraction), and {num_pinned} are",
                parameter="prefix",
                value=num_blocks,
                limit=limit - num_pinned,
            )
        self.client.pin_prefix(pin)
        self._pin_to_num_blocks[pin.pin_id] = num_blocks

    def unpin(self, pin_id: int) -> None:
        """Have the engine let go of a prefix. Any thread, idempotent, never raises."""
        if self._pin_to_num_blocks.pop(pin_id, None) is not None:
            self.client.unpin_prefix(pin_id)

    def end(self, inbox: StreamInbox) -> None:
        """Drop the requests of ``inbox`` in the engine and deliver what is held, with finish reason ``abort``."""
        if inbox.request is not None:
            self.client.abort_requests(self.outputs.abort(inbox.request, deliver=True))
            self._note_idle()

    def _end_all(self) -> None:
        for request_id in self.outputs.request_ids:
            self.client.abort_requests(self.outputs.abort(request_id, deliver=True))
        self._note_idle()

    def _fail_all(self, error: AsyncLLMError) -> None:
        for request_id in self.outputs.request_ids:
            self.client.abort_requests(self.outputs.fail(request_id, error))
        self._note_idle()

    # ---------------------------------------------------------------------------------------------------------- reading
    async def read(self) -> None:
        """Hand out what the engine sends until it dies; the body of the reader task."""
        receive, process, abort = self.client.recv, self.outputs.process, self.client.abort_requests
        while True:
            outputs = await receive()
            if to_abort := process(outputs):
                abort(to_abort)
            if self._idle is not None:
                self._note_idle()

    def die(self, error: BaseException) -> None:
        """Tell every stream that the engine is gone."""
        if not isinstance(error, EngineDeadError):
            logger.error("the reader of engine output failed", exc_info=error)
            cause = error
            error = EngineDeadError(f"the reader of engine output failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        if self.is_closed:
            return
        self.death = error
        self._fail_all(error)

    def _note_idle(self) -> None:
        """Tell those who drain if nothing is in flight. Any thread."""
        if self._idle is None or self.outputs.num_unfinished or self.event_loop is None:
            return
        if self.event_loop.is_current():
            self._idle.set()
            self._idle = None
        else:
            self.event_loop.run_soon(self._note_idle)

    # ------------------------------------------------------------------------------------------------------ what awaits
    async def call(self, method: str, *args: Any) -> Any:
        """Call a utility of the engine and return its value.

        :raises UtilityError: it failed there.
        :raises EngineDeadError: the engine is gone.
        """
        self.check()
        self.bind()
        return await self.client.call_utility(method, *args)

    async def drain(self, timeout_s: float | None) -> bool:
        """Wait until no request is in flight, here or in the engine; ``False`` if that took longer than ``timeout_s``.

        :raises EngineDeadError: the engine is gone.
        """
        self.bind()
        with anyio.move_on_after(timeout_s):
            while self.outputs.num_unfinished:
                if self._idle is None:
                    self._idle = anyio.Event()
                await self._idle.wait()
            await self.call("drain")
            return True
        return False

    async def aclose(self) -> None:
        """End every stream with what it holds, then the engine. Idempotent; a second caller waits for the first."""
        if self.is_closed:
            if self._closed is not None and self.event_loop is not None and self.event_loop.is_current():
                await self._closed.wait()
            return
        self.bind()
        self._end_all()
        self.is_closed = True
        self._closed = anyio.Event()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        try:
            await self.client.aclose()
        finally:
            self._closed.set()

    def drop(self) -> None:
        """Let go of the engine: its client ends it once the reader, the last to hold it, has left. Any thread."""
        self.is_closed = True
        reader, self._reader = self._reader, None
        if reader is not None and self.event_loop is not None:
            if self.event_loop.is_current():
                reader.cancel()
            else:
                self.event_loop.run_soon(reader.cancel)


class _Reader:
    """The reader task on one event loop."""

    def __init__(self, session: Session, loop: EventLoop) -> None:
        self._session = session
        self._scope = anyio.CancelScope()
        self._task = loop.spawn(self._run, "asyncllm reader")  # kept: event loops hold their tasks weakly

    async def _run(self) -> None:
        session = self._session
        try:
            with self._scope:
                await session.read()
        except Exception as error:
            session.die(error)
        finally:
            session.forget_reader(self)

    def cancel(self) -> None:
        """End the task; nothing happens where its event loop is over."""
        with contextlib.suppress(RuntimeError):
            self._scope.cancel()
