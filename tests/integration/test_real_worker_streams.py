"""A real worker behind AsyncLLM, on every event loop: a tiny Llama whose tokens transformers knows too.

Its step budget of 24 tokens chunks every longer prompt; nothing here may depend on that.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM, Completion, FinishReason
from asyncllm.errors import PromptTooLongError, UsageError
from asyncllm.testing import EOS
from tests.support import models
from tests.support.scripted import assert_settled

pytestmark = pytest.mark.anyio

BUDGET = 24
LOGPROB_TOLERANCE = 1e-4
"""Natural logs in float32, sums in another order; the largest difference seen is 1e-5."""


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapped"])
async def module_llm(anyio_backend: Any, tiny_llama: Path, request: pytest.FixtureRequest) -> AsyncIterator[AsyncLLM]:
    options = {"num_threads": 1, "num_blocks": 512, "max_num_batched_tokens": BUDGET}
    async with AsyncLLM(tiny_llama, async_scheduling=request.param, **options) as llm:
        assert llm.info.async_scheduling == request.param
        yield llm


@pytest.fixture
async def llm(module_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    yield module_llm
    await assert_settled(module_llm)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of 1 … 60 tokens, half of them with one of three shared beginnings."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(256) for _ in range(20)] for _ in range(3)]
    return [
        (chance.choice(beginnings) if i % 2 else []) + [chance.randrange(256) for _ in range(1 + i * 7 % 40)]
        for i in range(count)
    ]


async def gather(llm: AsyncLLM, asked: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return the tokens of all prompts, asked for at once."""
    results: dict[int, Completion] = {}

    async def one(index: int) -> None:
        results[index] = await llm.generate(asked[index], **options)

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(one, index)
    return [results[index].token_ids for index in range(len(asked))]


# ------------------------------------------------------------------------------------------------------- deterministic
async def test_greedy_tokens_equal_transformers(llm: AsyncLLM, tiny_llama: Path) -> None:
    asked = prompts(8)
    found = await gather(llm, asked, max_tokens=64, temperature=0.0, ignore_eos=True)
    assert found == [models.greedy(tiny_llama, prompt, 64) for prompt in asked]


async def test_r48_greedy_tokens_do_not_depend_on_the_size_of_the_batch(llm: AsyncLLM) -> None:
    asked = prompts(64, seed=48)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    alone = [(await llm.generate(prompt, **options)).token_ids for prompt in asked]
    for size in (2, 7, 64):
        await llm.reset_prefix_cache()
        order = list(range(64))
        random.Random(size).shuffle(order)
        for start in range(0, 64, size):
            batch = order[start : start + size]
            found = await gather(llm, [asked[index] for index in batch], **options)
            assert found == [alone[index] for index in batch]


async def test_r47_the_same_seed_gives_the_same_tokens_whatever_ran_between(llm: AsyncLLM) -> None:
    (prompt,) = prompts(1, seed=47)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    first = await llm.generate(prompt, seed=7, **options)
    await gather(llm, prompts(20), **options)
    again = await gather(llm, [prompt, *prompts(10), prompt], seed=7, **options)
    assert again[0] == again[-1] == first.token_ids


async def test_b103_seeds_tell_requests_apart_and_allowed_ids_force_them(llm: AsyncLLM) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}
    first, second, other = [(await llm.generate("prompt", seed=seed, **options)).token_ids for seed in (42, 42, 43)]
    assert first == second != other
    forced = await llm.generate("prompt", allowed_token_ids=[70, 71], **options)
    assert set(forced.token_ids) == {70, 71}
    samples = (await llm.generate("prompt", seed=42, n=3, **options)).samples
    assert len({tuple(sample.token_ids) for sample in samples}) == 3
    assert samples[0].token_ids == first


async def test_b63_a_reset_in_the_middle_does_not_change_the_text(llm: AsyncLLM, tiny_llama: Path) -> None:
    (prompt,) = prompts(1, seed=63)
    stream = llm.stream(prompt, max_tokens=400, temperature=0.0, ignore_eos=True)
    for _ in range(10):
        await anext(stream)
    assert await llm.reset_prefix_cache(reset_running=True)
    completion = await stream.completion()
    assert completion.token_ids == models.greedy(tiny_llama, prompt, 400)
    assert completion.usage.num_preemptions == 1


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_in_the_middle_does_not_change_the_tokens(llm: AsyncLLM, tiny_llama: Path, level: int) -> None:
    asked = prompts(9, seed=level)
    streams = [llm.stream(prompt, max_tokens=60, temperature=0.0, ignore_eos=True) for prompt in asked[:8]]
    seeded = llm.stream(asked[8], max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    for stream in (*streams, seeded):
        await anext(stream)
    await llm.sleep(level)
    stats = await llm.stats()
    late = llm.stream(asked[0], max_tokens=20, temperature=0.0, ignore_eos=True)
    assert stats.is_sleeping
    assert (stats.num_running, stats.num_free_blocks) == (0, llm.info.num_blocks)
    assert (await llm.stats()).num_steps == stats.num_steps
    await llm.wake_up()
    found = [(await stream.completion()).token_ids for stream in streams]
    assert found == [models.greedy(tiny_llama, prompt, 60) for prompt in asked[:8]]
    assert (await late.completion()).token_ids == found[0][:20]
    again = await llm.generate(asked[8], max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    assert (await seeded.completion()).token_ids == again.token_ids


async def test_sleep_and_wake_up_are_idempotent_and_a_bad_level_is_told(llm: AsyncLLM) -> None:
    await llm.wake_up()
    with pytest.raises(UsageError, match="level is 0"):
        await llm.sleep(0)
    for level in (1, 1, 2, 1):
        await llm.sleep(level)
        assert await llm.reset_prefix_cache()
        await llm.check_health()
    await llm.wake_up()
    await llm.wake_up()
    assert (await llm.generate("prompt", max_tokens=3)).token_ids


# ------------------------------------------------------------------------------------------------------------ logprobs
async def test_r60_b95_logprobs_of_a_prompt_in_five_chunks_equal_transformers(llm: AsyncLLM, tiny_llama: Path) -> None:
    prompt = [random.Random(60).randrange(256) for _ in range(5 * BUDGET)]
    completion = await llm.generate(prompt, prompt_logprobs=3, max_tokens=1)
    expected = models.log_probabilities(tiny_llama, prompt)
    found = completion.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for position, entry in enumerate(found[1:], 1):
        assert entry is not None
        row = expected[position - 1]
        assert entry.chosen.token_id == prompt[position]
        for candidate in (entry.chosen, *entry.top):
            assert candidate.logprob == pytest.approx(row[candidate.token_id].item(), abs=LOGPROB_TOLERANCE)
        assert [top.rank for top in entry.top] == [1, 2, 3]
        assert entry.top[0].logprob == pytest.approx(row.max().item(), abs=LOGPROB_TOLERANCE)


async def test_r61_each_item_has_the_logprobs_of_its_ids_and_they_equal_transformers(
    llm: AsyncLLM, tiny_llama: Path
) -> None:
    prompt = [random.Random(61).randrange(256) for _ in range(5 * BUDGET)]
    token_ids: list[int] = []
    values: list[float] = []
    async for delta in llm.stream(prompt, logprobs=0, max_tokens=30, temperature=1.0, seed=61, ignore_eos=True):
        assert delta.logprobs is not None
        assert [entry.chosen.token_id for entry in delta.logprobs] == delta.token_ids
        token_ids += delta.token_ids
        values += [entry.chosen.logprob for entry in delta.logprobs]
    assert len(token_ids) == 30
    expected = models.log_probabilities(tiny_llama, prompt + token_ids)
    for position, (token_id, value) in enumerate(zip(token_ids, values, strict=True), len(prompt) - 1):
        assert value == pytest.approx(expected[position, token_id].item(), abs=LOGPROB_TOLERANCE)


# -------------------------------------------------------------------------------------------------------- the context
async def test_r54_the_longest_prompt_is_one_token_short_of_the_context(llm: AsyncLLM, tiny_llama: Path) -> None:
    limit = llm.info.max_model_len
    assert limit == 512
    prompt = [random.Random(54).randrange(256) for _ in range(limit + 1)]
    completion = await llm.generate(prompt[: limit - 1], max_tokens=1, temperature=0.0)
    assert completion.token_ids == models.greedy(tiny_llama, prompt[: limit - 1], 1)
    for length in (limit, limit + 1):
        with pytest.raises(PromptTooLongError, match=f"{length} tokens"):
            llm.stream(prompt[:length], max_tokens=1)


async def test_r56_without_max_tokens_the_end_is_the_models_or_that_of_the_context(llm: AsyncLLM) -> None:
    completion = await llm.generate([65] * 490, ignore_eos=True)
    assert (len(completion.token_ids), completion.finish_reason) == (22, FinishReason.LENGTH)
    completion = await llm.generate([65] * 490, logit_bias={EOS: 100.0})
    assert (completion.token_ids[-1], completion.finish_reason) == (EOS, FinishReason.STOP)
    assert len(completion.token_ids) < 22


# ------------------------------------------------------------------------------------------------------------ at scale
async def test_a_thousand_streams_half_of_them_cancelled_at_random(llm: AsyncLLM) -> None:
    asked = prompts(50, seed=1000)
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    alone = [(await llm.generate(prompt, max_tokens=8, **options)).token_ids for prompt in asked]
    chance = random.Random(1000)
    cancelled = set(chance.sample(range(1000), 500))
    done: dict[int, list[int]] = {}
    num_cancelled = 0

    async def one(number: int, num_tokens: int) -> None:
        """Generate, or be cancelled once ``num_tokens`` have come: some while still queued, some while they decode."""
        nonlocal num_cancelled
        prompt = asked[number % 50]
        if number not in cancelled:
            done[number] = (await llm.generate(prompt, max_tokens=8, **options)).token_ids
            return
        with anyio.CancelScope() as scope:
            if num_tokens == 0:
                scope.deadline = anyio.current_time() + 0.1
            seen = 0
            async for _ in llm.stream(prompt, detokenize=False, **options):  # an item a token, whatever its text
                seen += 1
                if seen == num_tokens:
                    scope.cancel()
        num_cancelled += scope.cancelled_caught

    async with anyio.create_task_group() as group:
        for number in range(1000):
            group.start_soon(one, number, chance.randrange(12))
    assert done == {number: alone[number % 50] for number in range(1000) if number not in cancelled}
    assert num_cancelled == 500
    await assert_settled(llm)


async def test_r33_two_models_at_once_do_not_disturb_each_other(
    llm: AsyncLLM, tiny_llama: Path, tiny_opt: Path
) -> None:
    asked = prompts(3, seed=33)
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    found: dict[str, list[list[int]]] = {}

    async def ask(name: str, engine: AsyncLLM) -> None:
        found[name] = await gather(engine, asked, **options)

    async with AsyncLLM(tiny_opt, num_threads=1, num_blocks=64) as other, anyio.create_task_group() as group:
        group.start_soon(ask, "llama", llm)
        group.start_soon(ask, "opt", other)
    assert found["llama"] == [models.greedy(tiny_llama, prompt, 20) for prompt in asked]
    assert found["opt"] == [models.greedy(tiny_opt, prompt, 20) for prompt in asked]
    assert await gather(llm, asked, **options) == found["llama"]  # after the other one is gone


async def test_a_profile_is_written_where_the_caller_says(llm: AsyncLLM, tmp_path: Path) -> None:
    await llm.start_profile(tmp_path)
    await llm.generate("prompt", max_tokens=3)
    (trace,) = await llm.stop_profile()
    assert os.path.dirname(trace) == str(tmp_path)
    events = json.loads(await anyio.Path(trace).read_text())["traceEvents"]
    assert any(str(event.get("name", "")).startswith("aten::") for event in events)
