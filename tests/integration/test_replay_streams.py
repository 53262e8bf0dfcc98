"""Replay cases about what streams deliver: counts, order, slow readers, bursts, refusals; against a scripted engine."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from asyncllm import AsyncLLM, Completion, FinishReason, SamplingParams
from asyncllm.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidParameterError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    UsageError,
    UtilityError,
)
from tests.support.scripted import ENDLESS, LETTERS, assert_settled, assert_works, letters_llm, set_script
from tests.support.timing import best_of, percentile

pytestmark = pytest.mark.anyio


def letters(count: int) -> list[int]:
    return [LETTERS[i % len(LETTERS)] for i in range(count)]


async def gather(llm: AsyncLLM, prompts: list[Any], **options: Any) -> list[Completion]:
    """Return the completions of all prompts, asked for at once."""
    results: dict[int, Completion] = {}

    async def one(index: int) -> None:
        results[index] = await llm.generate(prompts[index], **options)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [results[index] for index in range(len(prompts))]


# ------------------------------------------------------------------------------------------------------ counts and ends
async def test_b01_a_hundred_requests_get_exactly_what_they_asked_for(llm: AsyncLLM) -> None:
    counts: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        counts[number] = []
        async for token in llm.stream(f"prompt {number}", max_tokens=10 + number):
            counts[number] += token.token_ids

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(one, number)
    assert counts == {number: letters(10 + number) for number in range(100)}


@pytest.mark.parametrize("n", [1, 3])
async def test_b08_only_the_last_item_of_a_sample_carries_the_finish_reason(llm: AsyncLLM, n: int) -> None:
    reasons: dict[int, list[FinishReason | None]] = {}
    async for token in llm.stream("prompt", n=n, max_tokens=5):
        reasons.setdefault(token.index, []).append(token.finish_reason)
    assert reasons == {index: [None] * 4 + [FinishReason.LENGTH] for index in range(n)}


async def test_r28_a_second_batch_of_awaits(llm: AsyncLLM) -> None:
    for _ in range(2):
        done = await gather(llm, [f"prompt {i}" for i in range(64)], max_tokens=8)
        assert [completion.token_ids for completion in done] == [letters(8)] * 64


async def test_r45_each_request_reports_its_own_end(llm: AsyncLLM) -> None:
    first = await llm.generate("prompt", stop_token_ids=[LETTERS[2]])
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, LETTERS[2])
    second = await llm.generate("prompt", max_tokens=5)
    assert (second.finish_reason, second.stop_reason) == (FinishReason.LENGTH, None)


async def test_r43_a_slow_reader_gets_every_token_once_and_one_at_a_time(llm: AsyncLLM) -> None:
    got = []
    async for token in llm.stream("prompt", max_tokens=200):
        got.append(token.token_ids)
        if len(got) % 50 == 0:
            await anyio.sleep(0.05)  # the engine is done long before
    assert got == [[token] for token in letters(200)]


async def test_r44_twenty_readers_one_of_them_slow(llm: AsyncLLM) -> None:
    got: dict[int, str] = {}

    async def read(number: int) -> None:
        text = ""
        async for token in llm.stream(f"prompt {number}", max_tokens=20 + number):
            text += token.text
            if number == 7:
                await anyio.sleep(0.005)
        got[number] = text

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(read, number)
    assert got == {number: bytes(letters(20 + number)).decode() for number in range(20)}


async def test_r59_samples_of_a_slow_reader_do_not_mix(llm: AsyncLLM) -> None:
    await set_script(llm, replies={"prompt": ["first", "second", "third", "fourth"]})
    texts = ["", "", "", ""]
    async for token in llm.stream("prompt", n=4):
        texts[token.index] += token.text
        await anyio.sleep(0.001)
    assert texts == ["first", "second", "third", "fourth"]


async def test_completion_gathers_all_samples_and_the_usage(llm: AsyncLLM) -> None:
    await set_script(llm, replies={"prompt": ["one", "other"]})
    completion = await llm.generate("prompt", SamplingParams(n=2))
    assert [sample.text for sample in completion.samples] == [completion.text, "other"] == ["one", "other"]
    assert completion.prompt_token_ids == list(b"prompt")
    assert completion.usage.prompt_tokens == 6
    assert completion.usage.completion_tokens == len("one" + "other") + 2  # with the two ends of sequence


async def test_logprobs_stand_beside_their_tokens(llm: AsyncLLM) -> None:
    async for token in llm.stream("prompt", max_tokens=6, logprobs=2):
        assert token.logprobs is not None
        assert [entry.chosen.token_id for entry in token.logprobs] == token.token_ids
        assert all(len(entry.top) == 2 for entry in token.logprobs)
    completion = await llm.generate("prompt", max_tokens=6, logprobs=0, prompt_logprobs=1)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == 6
    assert completion.prompt_logprobs[0] is None


# --------------------------------------------------------------------------------------------------------- slow readers
async def parked(llm: AsyncLLM) -> None:
    """Wait until the engine has parked a request."""
    while (await llm.stats()).num_parked == 0:
        pass


async def test_r76_a_reader_that_stops_is_parked_and_loses_nothing() -> None:
    async with letters_llm({"step_ms": 2}, max_buffered_tokens=128) as llm:
        slow = llm.stream("slow", max_tokens=400)
        got = []
        for _ in range(10):
            got += (await anext(slow)).token_ids
        await parked(llm)
        begun = (await llm.stats()).num_generated_tokens
        assert len((await llm.generate("fast", max_tokens=100)).token_ids) == 100
        assert (await llm.stats()).num_generated_tokens == begun + 100, "the parked request was computed"
        assert len(slow._inbox.items) <= 128
        async for token in slow:
            got += token.token_ids
        assert got == letters(400)


async def test_r76_a_parked_request_can_be_cancelled() -> None:
    async with letters_llm(max_buffered_tokens=8) as llm:
        slow = llm.stream("slow", **ENDLESS)
        await parked(llm)
        slow.cancel()
        await assert_settled(llm)


async def test_r76_a_parked_stream_that_is_dropped_is_aborted() -> None:
    async with letters_llm(max_buffered_tokens=8) as llm:
        slow = llm.stream("slow", **ENDLESS)
        await parked(llm)
        del slow
        gc.collect()
        await assert_settled(llm)


async def test_r76_a_parked_stream_that_is_finished_delivers_what_it_has() -> None:
    async with letters_llm(max_buffered_tokens=8) as llm:
        slow = llm.stream("slow", **ENDLESS)
        await parked(llm)
        slow.finish()
        completion = await slow.completion()
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.token_ids == letters(len(completion.token_ids))


# --------------------------------------------------------------------------------------------------------------- bursts
async def test_r74_a_burst_of_requests_leaves_the_engine_answering(llm: AsyncLLM) -> None:
    async def longest_answer_s() -> float:
        answers_s = []
        done: list[Completion] = []

        async def burst() -> None:
            done.extend(await gather(llm, [f"prompt {i}" for i in range(1280)], max_tokens=4))
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(burst)
            while True:
                began = time.perf_counter()
                await llm.check_health()
                answers_s.append(time.perf_counter() - began)
                await anyio.sleep(0.02)
        assert len(done) == 1280
        assert {len(completion.token_ids) for completion in done} == {4}
        return max(answers_s)

    assert await best_of(longest_answer_s, limit=0.1) < 0.1


async def test_r73_many_streams_leave_other_tasks_their_turns(llm: AsyncLLM) -> None:
    """A ticker and an echo over TCP live in the loop that reads 256 streams.

    Waits are counted in processor time of the loop's thread: what the streams take from the others, whatever else the
    machine does. Not counted: full collections of all that the test process has imported, 30 ms each.
    """
    await set_script(llm, step_ms=2)
    gc.collect()
    gc.freeze()
    ticks_s: list[float] = []
    echoes_s: list[float] = []

    async def tick() -> None:
        while True:
            began = time.thread_time()
            await anyio.sleep(0.001)
            ticks_s.append(time.thread_time() - began)

    async def echo(client: anyio.abc.SocketStream) -> None:
        async with client:
            async for data in client:
                await client.send(data)

    async def ask(address: tuple[str, int]) -> None:
        async with await anyio.connect_tcp(*address) as stream:
            while True:
                began = time.thread_time()
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
                echoes_s.append(time.thread_time() - began)
                await anyio.sleep(0.001)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo)
        group.start_soon(ask, listener.extra(anyio.abc.SocketAttribute.local_address))
        group.start_soon(tick)
        done = await gather(llm, [f"prompt {i}" for i in range(256)], max_tokens=400)
        group.cancel_scope.cancel()
    gc.unfreeze()
    assert [completion.token_ids for completion in done] == [letters(400)] * 256
    assert min(len(ticks_s), len(echoes_s)) > 100
    assert percentile(ticks_s, 0.99) < 0.01
    assert percentile(echoes_s, 0.99) < 0.01


async def test_b18_a_flood_does_not_starve_other_tasks(llm: AsyncLLM) -> None:
    """The engine got far ahead; no turn of another task waits for more than 50 ms of the loop's processor time."""
    gc.collect()
    gc.freeze()
    streams = [llm.stream(f"prompt {i}", max_tokens=1000) for i in range(100)]
    await anext(streams[0])
    time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still, and hundreds of messages pile up
    turns_s = [time.thread_time()]

    async def take_turns() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            turns_s.append(time.thread_time())

    async with anyio.create_task_group() as group:
        group.start_soon(take_turns)
        async with anyio.create_task_group() as readers:
            for stream in streams:
                readers.start_soon(stream.completion)
        group.cancel_scope.cancel()
    turns_s.append(time.thread_time())
    gc.unfreeze()
    assert {len((await stream.completion()).token_ids) for stream in streams} == {1000}
    assert max(after - before for before, after in itertools.pairwise(turns_s)) < 0.05


async def test_a_thousand_streams_half_of_them_cancelled(llm: AsyncLLM) -> None:
    done: dict[int, list[int]] = {}

    async def one(number: int) -> None:
        if number % 2:
            done[number] = (await llm.generate(f"prompt {number}", max_tokens=30)).token_ids
            return
        with anyio.move_on_after(number % 100 / 200):
            await llm.generate(f"prompt {number}", **ENDLESS)

    async with anyio.create_task_group() as group:
        for number in range(1000):
            group.start_soon(one, number)
    assert done == {number: letters(30) for number in range(1, 1000, 2)}
    await assert_settled(llm)


# ------------------------------------------------------------------------------------------------------------- refusals
async def test_r57_a_live_request_id_is_refused_and_the_first_goes_on(llm: AsyncLLM) -> None:
    first = llm.stream("prompt", request_id="x", max_tokens=20)
    with pytest.raises(DuplicateRequestError, match="'x'") as caught:
        llm.stream("other", request_id="x")
    assert caught.value.request_id == "x"
    assert len((await first.completion()).token_ids) == 20
    assert len((await llm.generate("other", request_id="x", max_tokens=3)).token_ids) == 3


async def test_ids_that_are_made_up_do_not_meet_those_of_callers(llm: AsyncLLM) -> None:
    streams = [llm.stream("prompt", request_id=f"request-{number}", max_tokens=2) for number in range(5)]
    streams += [llm.stream("prompt", max_tokens=2) for _ in range(5)]
    assert len({stream.request_id for stream in streams}) == 10
    for stream in streams:
        assert (await stream.completion()).request_id == stream.request_id


async def test_b26_a_request_id_is_a_string(llm: AsyncLLM) -> None:
    with pytest.raises(TypeError, match="request_id"):
        llm.stream("prompt", request_id=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("", {}, InvalidParameterError),
        ([], {}, InvalidParameterError),
        ([-1], {}, InvalidParameterError),
        ([260], {}, InvalidParameterError),
        ([2**62], {}, InvalidParameterError),
        ("x", {"stop": [""]}, InvalidParameterError),
        ("x", {"stop_token_ids": [265], "min_tokens": 1}, InvalidParameterError),
        ("x", {"logit_bias": {10**6: -100}}, InvalidParameterError),
        ("x", {"cache_salt": ""}, InvalidParameterError),
        ([65] * 8192, {}, PromptTooLongError),
        ("x" * 200_000, {}, PromptTooLongError),  # cannot fit, whatever its tokens are
    ],
)
async def test_b20_a_bad_request_is_refused_at_once_and_harms_nothing(
    llm: AsyncLLM, prompt: Any, options: dict[str, Any], error: type[RequestError]
) -> None:
    with pytest.raises(error):
        llm.stream(prompt, **options)
    with pytest.raises(error):
        await llm.generate(prompt, **options)
    await assert_settled(llm)
    await assert_works(llm)


async def test_a_long_prompt_is_refused_when_the_stream_is_first_read(llm: AsyncLLM) -> None:
    stream = llm.stream("x" * 9000)
    with pytest.raises(PromptTooLongError, match="9000"):
        await anext(stream)
    with pytest.raises(PromptTooLongError):
        await llm.generate("x" * 9000)


async def longest_gap_s(work: Callable[[], Awaitable[object]]) -> float:
    """Return the longest time for which ``work`` kept a ticker of 5 ms from running."""
    ticks = [time.perf_counter()]

    async def tick() -> None:
        while True:
            await anyio.sleep(0.005)
            ticks.append(time.perf_counter())

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await work()
        group.cancel_scope.cancel()
    ticks.append(time.perf_counter())
    return max(after - before for before, after in itertools.pairwise(ticks))


@pytest.mark.parametrize(
    ("num_chars", "max_model_len", "soon_s"),
    [
        pytest.param(5_000_000, 2000, 1, id="by its length"),
        pytest.param(500_000, 40_000, 20, id="once it is tokenized in a thread"),  # it could be 38,462 tokens
    ],
)
async def test_r72_a_huge_text_is_refused_without_holding_up_the_loop(
    num_chars: int, max_model_len: int, soon_s: float
) -> None:
    async with letters_llm(checkpoint={"max_position": max_model_len}) as llm:

        async def refused() -> None:
            with pytest.raises(PromptTooLongError):
                await llm.generate("x" * num_chars)

        with anyio.fail_after(soon_s):
            assert await best_of(lambda: longest_gap_s(refused), limit=0.05) < 0.05


async def test_messages_that_cannot_be_rendered_are_refused(llm: AsyncLLM) -> None:
    for messages in ([], [{"content": "no role"}], "text", None):
        with pytest.raises(InvalidParameterError):
            llm.chat(messages)  # type: ignore[arg-type]
    await assert_works(llm)
    async with letters_llm(checkpoint={"chat_template": None}) as plain:
        with pytest.raises(InvalidParameterError, match="template"):
            plain.chat([{"role": "user", "content": "hello"}])


async def test_a_request_that_was_never_sent_can_be_aborted_by_id() -> None:
    llm = AsyncLLM("nowhere")
    stream = llm.stream("prompt", request_id="x")
    await llm.abort(["x", "unknown"])
    assert [token.finish_reason async for token in stream] == [FinishReason.ABORT]
    assert (await stream.completion()).text == ""
    assert llm.engine_pid is None


async def test_params_and_keywords_exclude_each_other(llm: AsyncLLM) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        llm.stream("prompt", SamplingParams(), max_tokens=3)
    with pytest.raises(TypeError, match="max_token"):
        llm.stream("prompt", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidParameterError, match="params"):
        llm.stream("prompt", {"max_tokens": 3})  # type: ignore[arg-type]


async def test_b16_a_failing_send_leaves_no_request(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._session is not None
    with monkeypatch.context() as patch:
        patch.setattr(llm._session.client, "add_request", _overflow)
        with pytest.raises(OverflowError):
            llm.stream("prompt", request_id="x")
    assert len((await llm.generate("prompt", request_id="x", max_tokens=3)).token_ids) == 3


async def test_b17_a_failing_send_of_the_second_sample_aborts_the_first(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm._session is not None
    send = llm._session.client.add_request

    def send_first(request: Any) -> None:
        if request.sampling.sample_index:
            _overflow(request)
        send(request)

    with monkeypatch.context() as patch:
        patch.setattr(llm._session.client, "add_request", send_first)
        with pytest.raises(OverflowError):
            llm.stream("prompt", n=2, **ENDLESS)
    await assert_settled(llm)


def _overflow(request: Any) -> None:
    raise OverflowError("int too big to convert")


# ---------------------------------------------------------------------------------------------- failures of one request
async def test_b19_a_request_that_fails_in_the_engine_fails_alone(llm: AsyncLLM) -> None:
    await set_script(llm, fail_request=["bad", 0])
    neighbour = llm.stream("good", max_tokens=50)
    bad = llm.stream("bad", max_tokens=50)
    last = await anext(bad)
    assert (last.token_ids, last.finish_reason) == ([], FinishReason.ERROR)
    with pytest.raises(RequestFailedError, match="not finite"):
        await anext(bad)
    assert len((await neighbour.completion()).token_ids) == 50
    assert not llm.errored


async def test_what_was_received_is_delivered_before_the_failure(llm: AsyncLLM) -> None:
    await set_script(llm, fail_request=["bad", 3])
    text = ""
    with pytest.raises(RequestFailedError):
        async for token in llm.stream("bad", max_tokens=50):
            text += token.text
    assert text == "abc"


class BrokenDetokenizer:
    matched = None

    def push(self, token_id: int) -> None:
        raise ZeroDivisionError("detokenizer")

    def close(self) -> tuple[str, list[int]]:
        return "", []


async def test_r18_a_failing_detokenizer_ends_its_own_stream(llm: AsyncLLM) -> None:
    streams = [llm.stream(f"prompt {i}", max_tokens=10) for i in range(10)]
    request = streams[3]._inbox.request
    assert request is not None
    request.samples[0].detokenizer = BrokenDetokenizer()  # type: ignore[assignment]
    for number, stream in enumerate(streams):
        if number == 3:
            with pytest.raises(RequestFailedError) as caught:
                await stream.completion()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        else:
            assert len((await stream.completion()).token_ids) == 10


async def test_b31_a_failing_call_into_the_engine_fails_alone(llm: AsyncLLM) -> None:
    with pytest.raises(UtilityError, match="on purpose"):
        await llm.collective_rpc("fail", "on purpose")
    with pytest.raises(UtilityError, match="no_such_method"):
        await llm.collective_rpc("no_such_method")
    await assert_works(llm)


# ----------------------------------------------------------------------------------------------------------- the facade
async def test_pause_stops_the_steps_and_resume_goes_on(llm: AsyncLLM) -> None:
    await llm.pause()
    stream = llm.stream("prompt", max_tokens=5)
    before = await llm.stats()
    await anyio.sleep(0.01)
    assert (await llm.stats()).num_steps == before.num_steps
    await llm.resume()
    assert (await stream.completion()).text == "abcde"


async def test_drain_waits_for_what_is_in_flight(llm: AsyncLLM) -> None:
    stream = llm.stream("prompt", max_tokens=50)
    assert await llm.drain()
    assert stream.usage is not None
    endless = llm.stream("prompt", **ENDLESS)
    await set_script(llm, step_ms=5)
    assert not await llm.drain(0.02)
    endless.cancel()
    assert await llm.drain(5)


async def test_reset_prefix_cache_says_whether_it_was_done(llm: AsyncLLM) -> None:
    prompt = [65] * 64
    await llm.generate(prompt, max_tokens=1)
    assert (await llm.generate(prompt, max_tokens=1)).usage.cached_tokens == 48
    assert await llm.reset_prefix_cache()
    assert (await llm.generate(prompt, max_tokens=1)).usage.cached_tokens == 0
    await set_script(llm, step_ms=2)
    running = llm.stream("prompt", max_tokens=30)
    await anext(running)
    assert not await llm.reset_prefix_cache()
    assert await llm.reset_prefix_cache(reset_running=True)
    assert (await running.completion()).token_ids == letters(30)


async def test_b12_check_health_is_silent_and_facts_are_told(llm: AsyncLLM) -> None:
    await llm.check_health()
    assert llm.healthy
    assert not llm.errored
    assert llm.engine_pid == llm.info.pid
    assert llm.info.vocab_size == 260
    assert "running" in repr(llm)
    assert await llm.stop_profile() == []


async def test_a_closed_object_refuses_and_starts_again_when_asked_to() -> None:
    async with letters_llm() as llm:
        stream = llm.stream("prompt", **ENDLESS)
        await anext(stream)
        await llm.aclose()
        assert [token.finish_reason async for token in stream][-1] is FinishReason.ABORT
        for refused in (lambda: llm.stream("prompt"), lambda: llm.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(UsageError, match="closed"):
                refused()
        with pytest.raises(UsageError, match="closed"):
            await llm.stats()
        await llm.start()
        await assert_works(llm)


async def test_r16_all_streams_hear_of_the_killed_engine_within_a_second() -> None:
    async with letters_llm({"step_ms": 5}) as llm:
        errors: list[EngineDeadError] = []

        async def read() -> None:
            stream = llm.stream("prompt", **ENDLESS)
            text = (await anext(stream)).text
            with pytest.raises(EngineDeadError) as caught:
                async for token in stream:
                    text += token.text
            errors.append(caught.value)
            assert text == bytes(letters(len(text))).decode()

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(read)
            await anyio.sleep(0.05)
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            began = time.perf_counter()
        assert time.perf_counter() - began < 1
        assert [error.exit_code for error in errors] == [-signal.SIGKILL] * 8
        assert not llm.healthy
        assert llm.errored
        for refused in (llm.stats, llm.check_health, lambda: llm.generate("prompt")):
            with pytest.raises(EngineDeadError):
                await refused()  # type: ignore[operator]
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.stream("prompt")
        await llm.start()  # a new one
        await assert_works(llm)


async def test_r17_b40_the_cause_of_death_is_told_at_once_ever_after() -> None:
    async with letters_llm({"fail_at_step": 3}) as llm:
        stream = llm.stream("prompt", **ENDLESS)
        text = ""
        with pytest.raises(EngineDeadError) as caught:
            async for token in stream:
                text += token.text
        assert text == "ab"
        assert "scripted failure at step 3" in str(caught.value.__cause__)
        with pytest.raises(EngineDeadError) as later:
            llm.stream("prompt")
        assert "scripted failure at step 3" in str(later.value.__cause__)
        assert later.value is not caught.value


async def test_a_failing_reader_ends_every_stream(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async with letters_llm() as llm:
        assert llm._session is not None
        monkeypatch.setattr(llm._session.outputs, "process", lambda outputs: 1 / 0)
        with pytest.raises(EngineDeadError, match="reader") as caught:
            await llm.generate("prompt")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert llm.errored
