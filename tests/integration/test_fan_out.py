"""Branches, pinned prefixes and many prompts on a real worker: exact tokens, and counters that prove what is shared."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM, SamplingParams, TokenStream
from asyncllm.errors import InvalidParameterError, PromptTooLongError, RequestTooLargeError, UsageError
from tests.support.scripted import assert_settled

pytestmark = pytest.mark.anyio

BLOCK = 16
LONG: dict[str, Any] = {"max_tokens": 440, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module", params=[("auto", False), ("auto", True), ("cpu", False), ("reference", False)], ids=str)
async def module_llm(anyio_backend: Any, tiny_llama: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    backend, overlapped = request.param
    if backend != "auto" and anyio_backend[0] == "trio":
        backend = "auto"  # the loop makes no difference to a backend
    options: dict[str, Any] = {"num_threads": 1, "num_blocks": 256, "max_num_batched_tokens": 64}
    async with AsyncLLM(tiny_llama, async_scheduling=overlapped, attention_backend=backend, **options) as llm:
        async with llm.stream([1], **LONG) as source:  # what happens once may take as long as a whole stream
            await read(source, 1)
            await source.fork(max_tokens=1)[0].completion()
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    yield module_llm
    await assert_settled(module_llm)


def prompt_of(count: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(count)]


async def read(stream: TokenStream, count: int) -> tuple[list[int], str]:
    """Return ids and text of the next items, until there are ``count`` ids."""
    ids: list[int] = []
    text = ""
    async for token in stream:
        ids += token.token_ids
        text += token.text
        if len(ids) >= count:
            break
    return ids, text


# ------------------------------------------------------------------------------------------------------------- branches
@pytest.mark.parametrize("num_read", [1, 8, 20])
async def test_branches_are_what_a_new_request_would_be_and_compute_nothing_twice(llm: AsyncLLM, num_read: int) -> None:
    prompt = prompt_of(21, num_read)
    await llm.reset_prefix_cache()
    before = (await llm.stats()).num_prefill_tokens
    async with llm.stream(prompt, **LONG) as source:
        ids, text = await read(source, num_read)
        branches = [await branch.completion() for branch in source.fork(3, max_tokens=20)]
        rest, more = await read(source, 20)
    num_computed = [len(prompt) + len(ids) - branch.usage.cached_tokens for branch in branches]
    assert (await llm.stats()).num_prefill_tokens - before == len(prompt) + sum(num_computed)
    assert max(num_computed) <= BLOCK  # 1, but where a busy machine lets the source end before the fork comes
    fresh = await llm.generate([*prompt, *ids], max_tokens=20, temperature=0.0, ignore_eos=True)
    whole = await llm.generate(prompt, **{**LONG, "max_tokens": len(ids) + 20})
    for branch in branches:
        assert branch.token_ids == fresh.token_ids
        assert text + branch.text == whole.text
        assert branch.prompt_token_ids == [*prompt, *ids]
    assert (ids + rest)[: len(whole.token_ids)] == whole.token_ids
    assert (text + more).startswith(whole.text[:-3])


async def test_branches_go_on_when_their_source_is_left_at_once(llm: AsyncLLM) -> None:
    prompt = prompt_of(30, 5)
    await llm.reset_prefix_cache()
    before = (await llm.stats()).num_prefill_tokens
    async with llm.stream(prompt, **LONG) as source:
        ids, _ = await read(source, 5)
        branches = source.fork(4, max_tokens=10)
    done = [await branch.completion() for branch in branches]
    num_computed = [len(prompt) + len(ids) - branch.usage.cached_tokens for branch in done]
    assert (await llm.stats()).num_prefill_tokens - before == len(prompt) + sum(num_computed)
    assert max(num_computed) <= BLOCK
    fresh = await llm.generate([*prompt, *ids], max_tokens=10, temperature=0.0, ignore_eos=True)
    assert [branch.token_ids for branch in done] == [fresh.token_ids] * 4


async def test_a_branch_of_a_branch(llm: AsyncLLM) -> None:
    prompt = prompt_of(30, 6)
    async with llm.stream(prompt, **LONG) as source:
        ids, text = await read(source, 5)
        [child] = source.fork()
        [early] = child.fork(max_tokens=9)  # it has yielded nothing: where its source was
        child_ids, child_text = await read(child, 6)
        [late] = child.fork(max_tokens=9)
        child.cancel()
        first, second = await early.completion(), await late.completion()
    whole = await llm.generate(prompt, **{**LONG, "max_tokens": 40})
    assert [*ids, *first.token_ids] == whole.token_ids[: len(ids) + 9]
    assert [*ids, *child_ids, *second.token_ids] == whole.token_ids[: len(ids) + len(child_ids) + 9]
    assert whole.text.startswith((text + child_text + second.text)[:-3])


async def test_seeds_of_branches(llm: AsyncLLM) -> None:
    prompt = prompt_of(30, 7)
    sampling: dict[str, Any] = {**LONG, "temperature": 1.5, "seed": 11}

    async def fork(**options: Any) -> list[list[int]]:
        async with llm.stream(prompt, **sampling) as source:
            await read(source, 4)
            streams = source.fork(3, max_tokens=12, **options)
            return [(await stream.completion()).token_ids for stream in streams]

    derived, again = await fork(), await fork()
    assert derived == again
    assert len({tuple(ids) for ids in derived}) == 3
    explicit = await fork(seed=5)
    assert len({tuple(ids) for ids in explicit}) == 3
    source = llm.stream(prompt, **sampling)
    ids, _ = await read(source, 4)
    source.cancel()
    fresh = await llm.generate([*prompt, *ids], temperature=1.5, seed=6, max_tokens=12, ignore_eos=True)
    assert explicit[1] == fresh.token_ids
    assert await fork(seed=None) != await fork(seed=None)


async def test_each_branch_with_parameters_of_its_own_and_logprobs(llm: AsyncLLM) -> None:
    async with llm.stream(prompt_of(20, 8), **LONG, n=2) as source:
        ids: dict[int, list[int]] = {0: [], 1: []}
        async for token in source:
            ids[token.index] += token.token_ids
            if min(map(len, ids.values())) >= 4:
                break
        params = [
            SamplingParams(max_tokens=3, logprobs=2, temperature=0.0, ignore_eos=True),
            SamplingParams(max_tokens=5, n=2),
        ]
        first, second = source.fork(params=params, index=1)
        done, pair = await first.completion(), await second.completion()
    assert done.prompt_token_ids == prompt_of(20, 8) + ids[1]
    assert (len(done.token_ids), len(done.logprobs or ())) == (3, 3)
    assert len(pair.samples) == 2
    with pytest.raises(InvalidParameterError, match="index is 2"):
        source.fork(index=2)
    with pytest.raises(InvalidParameterError, match="n is 0"):
        source.fork(0)
    with pytest.raises(InvalidParameterError, match="2 entries for 3"):
        source.fork(3, params)


async def test_a_branch_of_a_completion_reuses_what_is_cached(llm: AsyncLLM) -> None:
    prompt = prompt_of(40, 9)
    done = await llm.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
    before = (await llm.stats()).num_prefill_tokens
    branches = [
        await stream.completion() for stream in llm.fork(done, 2, max_tokens=8, temperature=0.0, ignore_eos=True)
    ]
    num_computed = (await llm.stats()).num_prefill_tokens - before
    whole = await llm.generate(prompt, max_tokens=28, temperature=0.0, ignore_eos=True)
    for branch in branches:
        assert done.token_ids + branch.token_ids == whole.token_ids
        assert done.text + branch.text == whole.text
    assert num_computed == sum(60 - branch.usage.cached_tokens for branch in branches)
    assert num_computed <= 2 * 16


async def test_what_cannot_be_forked(llm: AsyncLLM) -> None:
    stream = llm.stream("x" * 3000, truncate_prompt_tokens=10, max_tokens=5)  # to be tokenized in a thread
    if stream.inbox.request is None:
        with pytest.raises(UsageError, match="was not sent yet"):
            stream.fork()
    await stream.completion()
    full = await llm.generate(prompt_of(20), max_tokens=None, ignore_eos=True)
    with pytest.raises(PromptTooLongError):
        llm.fork(full, 3)


async def test_branches_share_few_blocks_under_pressure(anyio_backend: Any, tiny_llama: Path) -> None:
    prompt = prompt_of(40, 3)
    async with AsyncLLM(tiny_llama, num_threads=1, num_blocks=12, max_model_len=150) as llm:
        source = llm.stream(prompt, **{**LONG, "max_tokens": 60})
        ids, _ = await read(source, 10)
        branches = source.fork(4, max_tokens=60)
        done: list[list[int]] = []
        async with anyio.create_task_group() as group:
            for branch in branches:

                async def one(branch: TokenStream = branch) -> None:
                    done.append((await branch.completion()).token_ids)

                group.start_soon(one)
        source.cancel()
        fresh = await llm.generate([*prompt, *ids], max_tokens=60, temperature=0.0, ignore_eos=True)
        assert done == [fresh.token_ids] * 4
        assert (await llm.stats()).num_preemptions
        await assert_settled(llm)


# ------------------------------------------------------------------------------------------------------------- prefixes
@pytest.mark.parametrize("num_tokens", [5, 32, 45])
async def test_a_prefix_is_computed_once_and_hit_by_all(llm: AsyncLLM, num_tokens: int) -> None:
    prefix = prompt_of(num_tokens, num_tokens)
    async with llm.prefix(prefix) as p:
        before = await llm.stats()
        assert before.num_pinned_blocks == -(-num_tokens // 16)
        done = [await p.generate(prompt_of(7, i), max_tokens=5, temperature=0.0) for i in range(4)]
        assert (await llm.stats()).num_prefill_tokens - before.num_prefill_tokens == 4 * 7
        assert (p.num_tokens, p.num_requests, p.num_hits, p.num_hit_tokens) == (num_tokens, 4, 4, 4 * num_tokens)
        assert repr(p) == f"<Prefix {num_tokens} tokens, 4 of 4 hits>"
        plain = [await llm.generate([*prefix, *prompt_of(7, i)], max_tokens=5, temperature=0.0) for i in range(4)]
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert (await llm.stats()).num_pinned_blocks == 0
    with pytest.raises(UsageError, match="not pinned"):
        p.stream("x")


async def test_a_prefix_of_text_is_that_text(llm: AsyncLLM) -> None:
    async with llm.prefix("You are a helpful assistant. ") as p:
        stream = p.stream("Hello", max_tokens=5, temperature=0.0)
        done = await stream.completion()
        assert p.num_hits == 1
    assert (
        done.token_ids
        == (await llm.generate("You are a helpful assistant. Hello", max_tokens=5, temperature=0.0)).token_ids
    )


async def test_prefixes_come_back_after_what_forgets_them(llm: AsyncLLM) -> None:
    async with llm.prefix(prompt_of(40, 1)) as p:
        assert await llm.reset_prefix_cache()
        assert (await llm.stats()).num_pinned_blocks == 0
        await p.generate([1], max_tokens=2)
        assert (p.num_requests, p.num_hits) == (1, 0)
        assert (await llm.stats()).num_pinned_blocks == 3
        await llm.sleep()
        await llm.wake_up()
        await p.generate([1], max_tokens=2)
        await p.generate([2], max_tokens=2)
        assert (p.num_requests, p.num_hits) == (3, 1)


async def test_budgets_of_prefixes(llm: AsyncLLM) -> None:
    with pytest.raises(RequestTooLargeError, match="max_prefix_tokens is 39"):
        await llm.prefix(prompt_of(40), max_prefix_tokens=39).__aenter__()
    small = llm.info.num_blocks // 2 * 16 // 200
    async with anyio.create_task_group():
        prefixes = [llm.prefix(prompt_of(200, i)) for i in range(small)]
        try:
            for number, prefix in enumerate(prefixes):
                if (number + 1) * 13 > llm.info.num_blocks // 2:
                    with pytest.raises(RequestTooLargeError, match="max_pinned_fraction"):
                        await prefix.__aenter__()
                else:
                    await prefix.__aenter__()
        finally:
            for prefix in prefixes:
                await prefix.__aexit__(None, None, None)
    with pytest.raises(UsageError, match="in use already"):
        async with llm.prefix([1, 2]) as p:
            await p.__aenter__()


# --------------------------------------------------------------------------------------------------------- many prompts
async def test_map_is_in_order_and_as_completed_has_all(llm: AsyncLLM) -> None:
    prompts = [prompt_of(5 + i, i) for i in range(30)]
    expected = [
        (await llm.generate(p, max_tokens=1 + i % 5, temperature=0.0)).token_ids[:1] for i, p in enumerate(prompts)
    ]
    mapped = [done.token_ids async for done in llm.map(prompts, max_tokens=1, temperature=0.0, max_in_flight=7)]
    assert mapped == expected
    found = {i: done.token_ids async for i, done in llm.as_completed(prompts, max_tokens=1, temperature=0.0)}
    assert [found[i] for i in range(30)] == expected
