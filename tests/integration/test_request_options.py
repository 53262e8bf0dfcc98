"""Options of a request from the caller's keyword to the item of the stream, over the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, Completion, RepetitionDetectionParams, SamplingParams
from asyncllm.errors import InvalidParameterError, RequestFailedError

PROMPT = list(range(20, 33))
ENGINES: dict[str, dict[str, Any]] = {
    "as it comes": {"num_blocks": 512},
    "torch": {"num_blocks": 512, "attention_backend": "cpu"},
    "in a process of its own": {"num_blocks": 512, "in_process": False},
    "forced preemption in chunks": {"num_blocks": 9, "max_num_batched_tokens": 11},
}


@pytest.fixture(params=ENGINES.values(), ids=ENGINES, scope="module")
def llm(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[LLM]:
    with LLM(tiny_llama, **{"in_process": True, "num_threads": 1, "max_model_len": 256, **request.param}) as llm:
        yield llm


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": True, **fields})


def generate(llm: LLM, prompt: list[int], **fields: Any) -> Completion:
    [done] = llm.generate([prompt], params(**fields))
    return done


def test_case103_bad_words_are_absent_from_the_text(llm: LLM) -> None:
    prompts = [PROMPT[: 1 + i % 13] for i in range(8)]
    free = llm.generate(prompts, [params(seed=i) for i in range(8)])
    words = sorted({letter for done in free for letter in done.text if "!" <= letter <= "~"})[:40]
    assert words
    bound = llm.generate(prompts, [params(seed=i, bad_words=words) for i in range(8)])
    assert not [word for word in words if any(word in done.text for done in bound)]
    assert [done.token_ids for done in bound] != [done.token_ids for done in free]
    again = [generate(llm, prompt, seed=i, bad_words=words).token_ids for i, prompt in enumerate(prompts)]
    assert again == [done.token_ids for done in bound]  # one by one, as together


def test_requested_logprobs_are_those_of_the_most_likely_where_both_are(llm: LLM) -> None:
    best = generate(llm, PROMPT, logprobs=64)
    ids = [5, 70, 9]
    alone = generate(llm, PROMPT, logprob_token_ids=ids)
    both = generate(llm, PROMPT, logprob_token_ids=ids, logprobs=2)
    assert best.token_ids == alone.token_ids == both.token_ids
    assert best.logprobs
    assert alone.logprobs
    assert both.logprobs
    assert [one.requested for one in alone.logprobs] == [one.requested for one in both.logprobs]
    num_compared = 0
    for full, short, mixed in zip(best.logprobs, alone.logprobs, both.logprobs, strict=True):
        assert (short.chosen, short.top, mixed.top) == (full.chosen, [], full.top[:2])
        assert [one.token_id for one in short.requested] == ids
        known = {one.token_id: one for one in full.top}
        for one in short.requested:
            num_compared += one.token_id in known
            assert known.get(one.token_id, one) == one
    assert num_compared


def test_a_truncated_prompt_runs_as_the_rest_of_it(llm: LLM) -> None:
    whole = generate(llm, PROMPT[-5:])
    cut = generate(llm, PROMPT, truncate_prompt_tokens=5)
    assert (cut.token_ids, cut.prompt_token_ids) == (whole.token_ids, PROMPT[-5:])
    assert cut.usage.prompt_tokens == 5
    longest = generate(llm, [7] * 1000, truncate_prompt_tokens=-1, max_tokens=20)
    assert len(longest.token_ids) == 20
    assert longest.usage.prompt_tokens == min(llm.info.max_model_len, llm.info.num_blocks * llm.info.block_size) - 20


def test_an_option_out_of_range_says_so_before_anything_is_sent(llm: LLM) -> None:
    for fields in ({"logprob_token_ids": [10**6]}, {"truncate_prompt_tokens": 257}, {"bad_words": [""]}):
        with pytest.raises(InvalidParameterError) as caught:
            llm.generate(PROMPT, **fields)
        assert caught.value.parameter == next(iter(fields))


def test_a_repetition_ends_the_sample_and_says_so(llm: LLM) -> None:
    """The only allowed token repeats itself; the other requests in the batch go on."""
    watched = params(
        allowed_token_ids=[65], repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    )
    done = llm.generate([PROMPT, PROMPT, PROMPT[:4]], [watched, params(allowed_token_ids=[65]), params()])
    assert [one.finish_reason for one in done] == ["repetition", "length", "length"]
    assert (done[0].text, done[0].stop_reason) == ("AAA", "repetition_detected")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
@pytest.mark.parametrize("attention_backend", ["auto", "cpu"])
async def test_a_request_without_a_token_left_fails_alone(
    anyio_backend: object, attention_backend: str, tiny_llama: Path
) -> None:
    """It shares KV blocks with one that runs and with one that comes later."""
    shared = [20 + i % 50 for i in range(80)]
    options = {"num_threads": 1, "max_model_len": 256, "num_blocks": 512, "attention_backend": attention_backend}
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    dead_end = SamplingParams(allowed_token_ids=[ord("a")], bad_words=["aa"], max_tokens=9)
    async with AsyncLLM(tiny_llama, **options) as llm:
        expected = await llm.generate([*shared, 7], greedy)
        neighbour = llm.stream([*shared, 7], greedy)
        await anext(neighbour)
        with pytest.raises(RequestFailedError, match="no token is left to draw"):
            await llm.generate([*shared, 8], dead_end)
        assert (await neighbour.completion()).token_ids == expected.token_ids
        for _ in range(2):  # what the failed one read is no longer found in the cache, then it is again
            later = await llm.generate([*shared, 7], greedy)
            assert later.token_ids == expected.token_ids
        assert later.usage.cached_tokens == 80
