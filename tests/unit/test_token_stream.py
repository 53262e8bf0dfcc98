"""The stream of one request, filled by hand: what its reader gets, and that every way out of it aborts at once."""

from __future__ import annotations

import gc
import threading
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from asyncllm._event_loop import current_event_loop
from asyncllm.errors import EngineDeadError, RequestFailedError, UsageError
from asyncllm.outputs import Completion, FinishReason, TokenDelta, Usage
from asyncllm.token_stream import StreamInbox, TokenStream

pytestmark = pytest.mark.anyio

USAGE = Usage(prompt_tokens=2, completion_tokens=3)


class Port:
    """Notes what a stream asks of the engine."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def abort(self, inbox: StreamInbox) -> None:
        self.asked.append("abort")

    def finish(self, inbox: StreamInbox) -> None:
        self.asked.append("finish")

    def park(self, inbox: StreamInbox, parked: bool) -> None:
        self.asked.append("park" if parked else "unpark")


class Request:
    """As much of a request's state as a partial completion needs."""

    def __init__(self, request_id: str, text: str) -> None:
        self.samples = [self]
        self._completion = Completion(request_id, 0, text, list(text.encode()), [1, 2], FinishReason.STOP, None, USAGE)

    def usage(self, now: float) -> Usage:
        return USAGE

    def completion(self, usage: Usage) -> Completion:
        return self._completion


def running(text: str = "abc", max_buffered_tokens: int = 100) -> tuple[TokenStream, StreamInbox, Port]:
    """Return a stream that has been sent, its inbox, and what it asked for."""
    port = Port()
    inbox = StreamInbox("r", 1, max_buffered_tokens)
    inbox.bind(port, current_event_loop(), Request("r", text))  # type: ignore[arg-type]
    return TokenStream(inbox, None, None), inbox, port


def delta(text: str, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(text, list(text.encode()), finish_reason=reason)


def ended(inbox: StreamInbox, text: str = "abc") -> None:
    for letter in text[:-1]:
        inbox.put(delta(letter))
    inbox.put(delta(text[-1], FinishReason.STOP))
    inbox.finish(Request("r", text).completion(USAGE))


# ------------------------------------------------------------ reading
async def test_items_come_in_order_and_the_stream_ends() -> None:
    stream, inbox, port = running()
    ended(inbox)
    assert [str(token) async for token in stream] == ["a", "b", "c"]
    assert (await stream.completion()).text == "abc"
    assert stream.usage == USAGE
    assert port.asked == []


async def test_a_waiting_reader_gets_each_item_as_it_comes() -> None:
    stream, inbox, _ = running()
    got: list[str] = []

    async def read() -> None:
        async for token in stream:
            got.append(token.text)  # noqa: PERF401 - looked at while it grows

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        inbox.put(delta("a"))
        await anyio.wait_all_tasks_blocked()
        assert got == ["a"]
        inbox.put(delta("b"))
        inbox.put(delta("c", FinishReason.LENGTH))
        inbox.finish(Request("r", "abc").completion(USAGE))
    assert got == ["a", "b", "c"]


async def test_a_cancelled_scope_stops_a_reader_that_always_finds_an_item() -> None:
    stream, inbox, port = running()
    for letter in "abcdef":
        inbox.put(delta(letter))
    got: list[str] = []
    with anyio.CancelScope() as scope:
        async for token in stream:
            got.append(token.text)
            if token.text == "b":
                scope.cancel()
    assert scope.cancelled_caught
    assert got == ["a", "b"]
    assert port.asked == ["abort"]


async def test_completion_of_a_stream_read_in_part_holds_everything() -> None:
    stream, inbox, _ = running()
    ended(inbox)
    assert str(await anext(stream)) == "a"
    assert (await stream.completion()).text == "abc"


async def test_r16_items_received_are_delivered_before_the_error() -> None:
    stream, inbox, port = running()
    inbox.put(delta("a"))
    inbox.fail(EngineDeadError("gone", exit_code=-9), USAGE)
    assert str(await anext(stream)) == "a"
    with pytest.raises(EngineDeadError) as caught:
        await anext(stream)
    assert caught.value.exit_code == -9
    assert port.asked == []  # the engine owes nothing that could be aborted


async def test_a_failed_stream_has_the_usage_that_came_with_the_error() -> None:
    stream, inbox, _ = running()
    assert stream.usage is None
    inbox.fail(RequestFailedError("no"), USAGE)
    stream.cancel()
    assert stream.usage is USAGE


async def test_what_a_cancelled_stream_has_cost_is_fixed_when_it_is_cancelled() -> None:
    """Its end may be under way while another thread cancels it: nothing of that is delivered, so it does not count."""
    stream, inbox, _ = running()
    inbox.put(delta("a"))
    assert str(await anext(stream)) == "a"
    stream.cancel()
    assert stream.usage is USAGE
    late = Usage(prompt_tokens=2, completion_tokens=99)
    inbox.finish(msgspec.structs.replace(Request("r", "abc").completion(USAGE), usage=late))
    assert stream.usage is USAGE
    completion = await stream.completion()
    assert completion.usage is USAGE
    inbox.fail(RequestFailedError("no"), late)
    assert stream.usage is USAGE


async def test_an_error_wakes_the_reader_that_waits() -> None:
    stream, inbox, _ = running()

    async def read() -> None:
        with pytest.raises(RequestFailedError):
            await anext(stream)

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        inbox.fail(RequestFailedError("no"), USAGE)


async def test_one_error_raised_by_many_streams_keeps_their_tracebacks_apart() -> None:
    error = EngineDeadError("gone")
    caught = []
    for _ in range(2):
        stream, inbox, _ = running()
        inbox.fail(error, USAGE)
        with pytest.raises(EngineDeadError) as info:
            await anext(stream)
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert error.__traceback__ is None


async def test_a_second_reader_is_refused_and_the_first_goes_on() -> None:
    stream, inbox, port = running()

    async def read() -> None:
        assert str(await anext(stream)) == "a"

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(UsageError, match="read by another task"):
            await anext(stream)
        assert port.asked == []
        inbox.put(delta("a"))


# ------------------------------------------------------------ every way out
async def read_for_ever(stream: TokenStream) -> None:
    async for _ in stream:
        pass


async def test_cancelling_a_scope_aborts() -> None:
    stream, _, port = running()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await read_for_ever(stream)
    assert port.asked == ["abort"]


async def test_a_deadline_aborts() -> None:
    stream, _, port = running()
    with anyio.move_on_after(0.001):
        await read_for_ever(stream)
    assert port.asked == ["abort"]


async def test_the_failure_of_a_sibling_aborts() -> None:
    stream, _, port = running()

    async def fail() -> None:
        await anyio.wait_all_tasks_blocked()
        raise ValueError("sibling")

    with pytest.raises(BaseExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(read_for_ever, stream)
            group.start_soon(fail)
    assert port.asked == ["abort"]


async def test_break_aborts_when_nobody_holds_the_stream() -> None:
    stream, inbox, port = running()
    inbox.put(delta("a"))
    streams = [stream]
    del stream
    async for _ in streams.pop():
        break
    assert port.asked == ["abort"]


async def test_break_aborts_at_the_end_of_the_with_block() -> None:
    stream, inbox, port = running()
    inbox.put(delta("a"))
    async with stream:
        async for _ in stream:
            break
    assert port.asked == ["abort"]


async def test_an_error_in_the_body_aborts_although_the_traceback_lives() -> None:
    stream, inbox, port = running()
    inbox.put(delta("a"))
    streams = [stream]
    del stream

    async def body() -> None:
        async for _ in streams.pop():
            raise ValueError("body")

    with pytest.raises(ValueError, match="body") as caught:
        await body()
    assert port.asked == ["abort"]
    assert caught.value.__traceback__ is not None


async def test_dropping_a_stream_in_another_thread_aborts() -> None:
    stream, _, port = running()
    streams = [stream]
    del stream
    thread = threading.Thread(target=streams.clear)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    assert port.asked == ["abort"]


async def test_a_stream_in_a_reference_cycle_aborts_when_it_is_collected() -> None:
    stream, _, port = running()
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    assert port.asked == ["abort"]


async def test_r13_aclose_by_another_task_ends_the_reader_quietly() -> None:
    stream, _, port = running()
    async with anyio.create_task_group() as group:
        group.start_soon(read_for_ever, stream)
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
        await stream.aclose()
        stream.cancel()
    assert port.asked == ["abort"]


async def test_cancel_from_another_thread_ends_the_reader() -> None:
    stream, _, port = running()
    async with anyio.create_task_group() as group:
        group.start_soon(read_for_ever, stream)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(stream.cancel)
    assert port.asked == ["abort"]


async def test_r10_nothing_is_delivered_after_cancel() -> None:
    stream, inbox, _ = running()
    inbox.put(delta("a"))
    stream.cancel()
    inbox.put(delta("b"))
    assert [token async for token in stream] == []


async def test_cancel_after_the_end_asks_nothing_of_the_engine() -> None:
    stream, inbox, port = running()
    ended(inbox)
    await stream.completion()
    stream.cancel()
    del stream
    assert port.asked == []


async def test_r12_the_completion_of_a_cancelled_stream_holds_what_was_delivered() -> None:
    stream, inbox, _ = running("abc")
    for letter in "abc":
        inbox.put(delta(letter))
    await anext(stream)
    stream.cancel()
    completion = await stream.completion()
    assert (completion.text, completion.token_ids) == ("a", [97])
    assert completion.finish_reason is FinishReason.ABORT
    assert [sample.text for sample in completion.samples] == ["a"]


async def test_finish_asks_for_a_soft_end() -> None:
    stream, inbox, port = running()
    stream.finish()
    assert port.asked == ["finish"]
    inbox.put(delta("", FinishReason.ABORT))
    inbox.finish(Request("r", "").completion(USAGE))
    assert [token.finish_reason async for token in stream] == [FinishReason.ABORT]


# ------------------------------------------------------------ before it is sent
async def test_a_pending_stream_is_sent_when_it_is_first_read() -> None:
    inbox = StreamInbox("r", 1, 100)
    port = Port()

    async def admit() -> None:
        await anyio.lowlevel.checkpoint()
        inbox.bind(port, current_event_loop(), Request("r", "abc"))  # type: ignore[arg-type]
        ended(inbox)

    stream = TokenStream(inbox, admit, None)
    assert [str(token) async for token in stream] == ["a", "b", "c"]


async def test_a_pending_stream_that_is_cancelled_is_never_sent() -> None:
    inbox = StreamInbox("r", 1, 100)
    stream = TokenStream(inbox, lambda: pytest.fail("sent"), None)
    stream.cancel()
    assert [token async for token in stream] == []
    assert (await stream.completion()).finish_reason is FinishReason.ABORT


async def test_a_pending_stream_that_is_finished_is_never_sent() -> None:
    inbox = StreamInbox("r", 2, 100)
    stream = TokenStream(inbox, lambda: pytest.fail("sent"), None)
    stream.finish()
    assert [(token.index, token.finish_reason) async for token in stream] == [(0, "abort"), (1, "abort")]
    assert [sample.index for sample in (await stream.completion()).samples] == [0, 1]


async def test_cancel_while_the_request_is_being_sent_ends_the_reader() -> None:
    stream = TokenStream(StreamInbox("r", 1, 100), anyio.sleep_forever, None)
    async with anyio.create_task_group() as group:
        group.start_soon(read_for_ever, stream)
        await anyio.wait_all_tasks_blocked()
        stream.cancel()


async def test_finish_while_the_request_is_being_sent_ends_the_reader() -> None:
    stream = TokenStream(StreamInbox("r", 1, 100), anyio.sleep_forever, None)
    async with anyio.create_task_group() as group:
        group.start_soon(read_for_ever, stream)
        await anyio.wait_all_tasks_blocked()
        stream.finish()


async def test_the_error_of_sending_is_raised_once_and_the_stream_is_over() -> None:
    async def refuse() -> None:
        raise RequestFailedError("refused")

    stream = TokenStream(StreamInbox("r", 1, 100), refuse, None)
    with pytest.raises(RequestFailedError):
        await anext(stream)
    assert [token async for token in stream] == []


# ------------------------------------------------------------ slow readers
async def test_r76_a_slow_reader_parks_the_request_before_the_limit_and_unparks_it_once() -> None:
    stream, inbox, port = running(max_buffered_tokens=8)
    for _ in range(8):
        inbox.put(delta("a"))
    assert port.asked == ["park"]
    for _ in range(5):
        await anext(stream)
    assert port.asked == ["park"]
    await anext(stream)
    assert port.asked == ["park", "unpark"]
    await anext(stream)
    assert port.asked == ["park", "unpark"]


async def test_the_smallest_limit_parks_after_one_item() -> None:
    stream, inbox, port = running(max_buffered_tokens=1)
    inbox.put(delta("a"))
    assert port.asked == ["park"]
    await anext(stream)
    assert port.asked == ["park", "unpark"]


async def test_a_parked_request_that_has_ended_is_not_unparked() -> None:
    stream, inbox, port = running(max_buffered_tokens=2)
    ended(inbox)
    await stream.completion()
    assert port.asked == ["park"]


async def test_repr_says_the_state() -> None:
    stream, inbox, _ = running()
    assert repr(stream) == "<TokenStream 'r' running>"
    ended(inbox)
    assert "ended" in repr(stream)
    stream.cancel()
    assert "discarded" in repr(stream)
    assert "pending" in repr(TokenStream(StreamInbox("p", 1, 1), None, None))


def test_a_stream_belongs_to_one_event_loop() -> None:
    async def open_one() -> TokenStream:
        return running()[0]

    async def read(stream: TokenStream) -> None:
        with pytest.raises(UsageError, match="another event loop"):
            await anext(stream)

    anyio.run(read, anyio.run(open_one))


async def test_a_stream_that_is_awaited_or_iterated_like_a_list_says_how_it_is_read() -> None:
    for misuse in ("await", "for"):
        stream, _, port = running()
        with pytest.raises(UsageError, match=r"iterate it with `async for`, or `await stream.completion\(\)`"):
            await stream if misuse == "await" else list(stream)  # type: ignore[call-overload]
        assert port.asked == ["abort"], "nobody reads it: the engine is told at once"
