"""Cancel each operation at each of its awaits: nothing is left, and the next request works."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import msgspec
import pytest

from asyncllm import AsyncLLM
from asyncllm.errors import PromptTooLongError
from tests.support.scripted import ENDLESS, assert_settled, assert_works, at_every_await, cancelled_at

pytestmark = pytest.mark.anyio

LONG_PROMPT = "x" * 5000  # tokenized in a thread


@pytest.fixture
def check(llm: AsyncLLM) -> Callable[[], Awaitable[None]]:
    async def settled_and_working() -> None:
        await assert_settled(llm)
        await assert_works(llm)

    return settled_and_working


Check = Callable[[], Awaitable[None]]


async def test_reading_a_stream(llm: AsyncLLM, check: Check) -> None:
    async def read() -> None:
        async for _ in llm.stream("prompt", max_tokens=5):
            pass

    assert await at_every_await(read, check) >= 3


async def test_waiting_for_something_else_in_the_body(llm: AsyncLLM, check: Check) -> None:
    async def read() -> None:
        async for _ in llm.stream("prompt", max_tokens=5):
            await anyio.lowlevel.checkpoint()

    assert await at_every_await(read, check) >= 6


async def test_reading_a_stream_in_a_with_block(llm: AsyncLLM, check: Check) -> None:
    async def read() -> None:
        async with llm.stream("prompt", max_tokens=5) as stream:
            async for _ in stream:
                await anyio.lowlevel.checkpoint()

    assert await at_every_await(read, check) >= 6


async def test_reading_a_stream_that_a_variable_holds(llm: AsyncLLM, check: Check) -> None:
    async def read() -> None:
        stream = llm.stream("prompt", max_tokens=25)  # a busy machine brings several at once
        kept.append(stream)
        async for _ in stream:
            pass

    kept: list[Any] = []
    assert await at_every_await(read, check) >= 3


async def test_generate_several_samples(llm: AsyncLLM, check: Check) -> None:
    async def generate() -> None:
        await llm.generate("prompt", max_tokens=20, n=3)  # a busy machine brings several at once

    assert await at_every_await(generate, check) >= 3


async def test_generate_from_a_prompt_that_is_tokenized_in_a_thread(llm: AsyncLLM, check: Check) -> None:
    async def generate() -> None:
        await llm.generate(LONG_PROMPT, max_tokens=2)

    assert await at_every_await(generate, check) >= 3


async def test_a_refusal_by_the_thread(llm: AsyncLLM, check: Check) -> None:
    async def generate() -> None:
        with pytest.raises(PromptTooLongError):
            await llm.generate([65] * 60_000)

    assert await at_every_await(generate, check) >= 1


async def test_a_schema_of_a_type_that_is_made_in_a_thread(llm: AsyncLLM, check: Check) -> None:
    """And a request that is cancelled while it waits for its grammar."""

    async def generate() -> None:
        schema = list[msgspec.defstruct("New", [("a", bool)])]  # pyright: ignore[reportInvalidTypeForm]
        await llm.generate("prompt", schema=schema, max_tokens=40)

    assert await at_every_await(generate, check) >= 2


async def test_generate_in_a_burst(llm: AsyncLLM, check: Check) -> None:
    async def generate() -> None:
        session = llm._session
        assert session is not None
        session.pace._spent_s += 0.006  # as after a hundred requests in the same turn of the loop
        await llm.generate("prompt", max_tokens=3)

    assert await at_every_await(generate, check) >= 3


async def test_chat(llm: AsyncLLM, check: Check) -> None:
    async def chat() -> None:
        await llm.chat([{"role": "user", "content": "hello"}], max_tokens=4).completion()

    assert await at_every_await(chat, check) >= 3


async def test_chat_with_a_template_of_its_own(llm: AsyncLLM, check: Check) -> None:
    """Every chat here brings a template that was never seen, which is compiled in a thread."""
    numbers = itertools.count()

    async def chat() -> None:
        template = f"{{{{ messages[0].content }}}} <think> {next(numbers)}"
        await llm.chat([{"role": "user", "content": "hello"}], chat_template=template, max_tokens=4).completion()

    assert await at_every_await(chat, check) >= 3


async def test_calls_into_the_engine(llm: AsyncLLM, check: Check) -> None:
    async def call() -> None:
        await llm.stats()
        await llm.check_health()
        await llm.reset_prefix_cache()
        assert await llm.collective_rpc("echo", 1) == [[1]]
        await llm.start_profile()
        await llm.stop_profile()
        await llm.pause()
        await llm.resume()

    async def resumed() -> None:
        await llm.resume()
        await check()

    assert await at_every_await(call, resumed) >= 8


async def test_falling_asleep_and_waking_up(llm: AsyncLLM, check: Check) -> None:
    async def nap() -> None:
        stream = llm.stream("prompt", max_tokens=4)
        await anext(stream)
        await llm.sleep(2)
        await llm.wake_up()
        assert (await stream.completion()).text == "abcd"

    async def awake() -> None:
        await llm.wake_up()
        await check()

    assert await at_every_await(nap, awake) >= 3


async def test_waiting_for_an_engine_that_sleeps(llm: AsyncLLM, check: Check) -> None:
    async def wait() -> None:
        await llm.sleep()
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(llm.generate, "prompt", max_tokens=3))
            await llm.stats()
            await llm.wake_up()

    async def awake() -> None:
        await llm.wake_up()
        await check()

    assert await at_every_await(wait, awake) >= 3


async def test_abort(llm: AsyncLLM, check: Check) -> None:
    async def abort() -> None:
        stream = llm.stream("prompt", request_id="x", **ENDLESS)
        await anext(stream)
        await llm.abort("x")

    assert await at_every_await(abort, check) >= 2


async def test_drain(llm: AsyncLLM, check: Check) -> None:
    async def drain() -> None:
        async with llm.stream("prompt", max_tokens=4) as stream:  # so that it is gone before the exception is
            assert await llm.drain()
            assert (await stream.completion()).text == "abcd"

    assert await at_every_await(drain, check) >= 2


async def test_task_cancel_of_asyncio_at_every_await(anyio_backend: Any, llm: AsyncLLM, check: Check) -> None:
    if anyio_backend[0] != "asyncio":
        pytest.skip("asyncio's own way to cancel")

    async def generate(k: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        place = cancelled_at(k, llm.generate(LONG_PROMPT, max_tokens=4), task.cancel)
        places.append(place)
        await place

    places: list[cancelled_at] = []
    for k in range(1, 100):
        task = asyncio.create_task(generate(k))
        await asyncio.wait([task])
        await check()
        if not task.cancelled():
            break
    assert len(places) >= 4
    assert places[-1].num_suspensions < k
    await task


# ------------------------------------------------------------------------------------------------------ several at once
async def test_r01_two_hundred_streams_cancelled_before_their_first_token(llm: AsyncLLM, check: Check) -> None:
    async def one(k: int, work: Coroutine[Any, Any, Any]) -> None:
        with anyio.CancelScope() as scope:
            await cancelled_at(1 + k % 3, work, scope.cancel)

    async def read(number: int) -> None:
        prompt = LONG_PROMPT if number % 10 == 0 else f"prompt {number}"
        async for _ in llm.stream(prompt, **ENDLESS):
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(one, number, read(number))
    await check()


async def test_r01_cancelled_at_random_while_submitting_takes_twenty_milliseconds(
    llm: AsyncLLM, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm._session is not None
    process = llm._session.inputs.process

    def slow_process(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)  # in a worker thread, since the prompt is long
        return process(*args, **kwargs)

    monkeypatch.setattr(llm._session.inputs, "process", slow_process)
    chance = random.Random(1)

    async def one(number: int) -> None:
        with anyio.move_on_after(chance.random() * 0.2):  # 40 threads take 5 rounds of 20 ms for 200
            async for _ in llm.stream(LONG_PROMPT, **ENDLESS):
                await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(one, number)
    monkeypatch.undo()
    await check()


async def test_a_task_group_that_fails_aborts_its_streams(llm: AsyncLLM, check: Check) -> None:
    async def read() -> None:
        async for _ in llm.stream("prompt", **ENDLESS):
            pass

    async def fail() -> None:
        await anext(llm.stream("prompt"))
        raise ValueError("sibling")

    with pytest.raises(BaseExceptionGroup):
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(read)
            group.start_soon(fail)
    await check()


async def test_a_fork_and_its_branches(llm: AsyncLLM, check: Check) -> None:
    async def fork() -> None:
        async with llm.stream("prompt", **ENDLESS) as stream:
            await anext(stream)
            async with stream.fork(3, max_tokens=3) as branches:
                async for _ in branches[0]:
                    pass
                for branch in branches[1:]:
                    await branch.completion()

    assert await at_every_await(fork, check) >= 3


async def test_a_prefix(llm: AsyncLLM, check: Check) -> None:
    async def use() -> None:
        async with llm.prefix("prefix") as prefix:
            await prefix.generate("prompt", max_tokens=3)

    async def unpinned() -> None:
        await check()
        assert (await llm.stats()).num_pinned_blocks == 0

    assert await at_every_await(use, unpinned) >= 2


async def test_a_prefix_that_is_tokenized_in_a_thread(llm: AsyncLLM, check: Check) -> None:
    async def use() -> None:
        async with llm.prefix(LONG_PROMPT):
            pass

    async def unpinned() -> None:
        await check()
        assert (await llm.stats()).num_pinned_blocks == 0

    assert await at_every_await(use, unpinned) >= 2


async def test_many_prompts(llm: AsyncLLM, check: Check) -> None:
    async def many() -> None:
        async for _ in llm.map(["a", LONG_PROMPT, "c", "d"], max_tokens=3, max_in_flight=2):
            await anyio.lowlevel.checkpoint()

    assert await at_every_await(many, check) >= 5


async def test_prompts_that_come_later(llm: AsyncLLM, check: Check) -> None:
    async def prompts() -> AsyncIterator[str]:
        for letter in "abc":
            await llm.check_health()
            yield letter

    async def many() -> None:
        async with llm.as_completed(prompts(), max_tokens=3, max_in_flight=2) as completions:
            async for _ in completions:
                pass

    assert await at_every_await(many, check) >= 3
