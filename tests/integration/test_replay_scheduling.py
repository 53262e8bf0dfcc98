"""Replay cases about who runs when, as callers see it: urgent, preempted and parked requests, and what never fits."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM
from asyncllm.errors import PromptTooLongError
from tests.support.scripted import ENDLESS, LETTERS, assert_settled, letters_llm

pytestmark = pytest.mark.anyio


def letters(count: int) -> list[int]:
    return [LETTERS[i % len(LETTERS)] for i in range(count)]


async def steps(llm: AsyncLLM) -> list[dict[str, Any]]:
    return (await llm.collective_rpc("history"))[0]


async def test_r62_what_never_fits_is_refused_and_those_behind_it_run() -> None:
    async with letters_llm(num_blocks=49, block_size=16) as llm:
        with pytest.raises(PromptTooLongError, match="1002 tokens; the longest prompt has 783"):
            llm.stream([65] * 1002)
        assert (await llm.generate("small", max_tokens=3)).token_ids == letters(3)


async def test_r64_a_house_full_of_parked_streams_that_are_aborted_lets_others_in() -> None:
    async with letters_llm(max_num_seqs=4, max_buffered_tokens=8) as llm:
        slow = [llm.stream(f"slow {i}", **ENDLESS) for i in range(8)]
        while (await llm.stats()).num_parked < 8:
            pass
        for stream in slow:
            stream.cancel()
        assert (await llm.generate("prompt", max_tokens=30)).token_ids == letters(30)
        await assert_settled(llm)


async def test_r64_others_run_beside_parked_streams_and_these_go_on() -> None:
    async with letters_llm({"step_ms": 2}, max_num_seqs=4, max_buffered_tokens=8) as llm:
        slow = [llm.stream(f"slow {i}", max_tokens=40) for i in range(4)]
        while (await llm.stats()).num_parked < 4:
            pass
        assert (await llm.generate("prompt", max_tokens=30)).token_ids == letters(30)
        for stream in slow:
            assert (await stream.completion()).token_ids == letters(40)


async def test_r67_an_urgent_request_gets_its_first_token_within_three_steps() -> None:
    async with letters_llm({"step_ms": 10}, policy="priority", max_num_seqs=4) as llm:
        background = [llm.stream(f"background {i}", max_tokens=40, priority=5) for i in range(4)]
        for stream in background:
            await anext(stream)
        num_steps = (await llm.stats()).num_steps
        urgent = llm.stream("urgent", max_tokens=5, priority=0)
        assert (await urgent.completion()).token_ids == letters(5)
        done = [await stream.completion() for stream in background]
        assert [completion.token_ids for completion in done] == [letters(40)] * 4
        assert sorted(completion.usage.num_preemptions for completion in done) == [0, 0, 0, 1]
        newest = max(request_id for step in await steps(llm) for request_id in step["request_ids"])
        (first, *_) = (i for i, step in enumerate(await steps(llm), 1) if newest in step["request_ids"])
        assert first <= num_steps + 3


async def test_r68_a_preempted_request_goes_on_before_fresh_ones_of_its_class() -> None:
    async with letters_llm({"step_ms": 5}, policy="priority", max_num_seqs=1) as llm:
        ended: list[str] = []

        async def read(name: str, priority: int, started: anyio.Event) -> None:
            stream = llm.stream(name, max_tokens=10, priority=priority)
            async for _ in stream:
                started.set()
            ended.append(name)
            assert (await stream.completion()).token_ids == letters(10)
            assert stream.usage is not None
            assert stream.usage.num_preemptions == (1 if name == "preempted" else 0)

        async with anyio.create_task_group() as group:
            for name, priority in (("preempted", 3), ("urgent", 0), ("fresh", 3)):
                started = anyio.Event()
                group.start_soon(read, name, priority, started)
                if name != "fresh":
                    await started.wait()
        assert ended == ["urgent", "preempted", "fresh"]


async def test_b102_prompt_tokens_are_counted_once_and_output_tokens_at_each_step() -> None:
    async with letters_llm({"step_ms": 1}, max_num_batched_tokens=7) as llm:
        stream = llm.stream([65] * 20, max_tokens=30)
        await anext(stream)
        during = await llm.stats()
        assert during.num_prefill_tokens == 20
        assert 1 <= during.num_generated_tokens < 30
        await stream.completion()
        after = await llm.stats()
        assert (after.num_prefill_tokens, after.num_generated_tokens) == (20, 30)
        assert (after.prefix_queries, after.prefix_hits) == (20, 0)
        assert after.num_steps == 3 + 29  # 7 + 7 + 6 prompt tokens, the last chunk with the first token


async def test_samples_share_one_prefill_but_for_the_block_that_is_not_full() -> None:
    async with letters_llm(block_size=16) as llm:
        await llm.generate([65] * 100, max_tokens=3, n=8)
        assert (await llm.stats()).num_prefill_tokens == 100 + 7 * (100 - 6 * 16)
