"""Prompt lookup through the whole engine with a real worker: the same deltas with it and without, and fewer steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncllm import LLM, AsyncLLM, Completion, RepetitionDetectionParams, SamplingParams
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support.kernels import native_kernels

pytestmark = pytest.mark.anyio

PHRASE = [72, 101, 108, 108, 111, 44, 32, 119]
PROMPTS: list[list[int]] = (
    [[*PHRASE * 3, 70 + i] for i in range(3)] + [[80 + i] * 9 for i in range(3)] + [PHRASE[::-1] * 5]
)
"""Repetitive ones: a random model goes on with what it sees, or falls into a loop."""

NUMBERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"quantization": "int8"},
    "int4, keys and values in int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "torch": {"attention_backend": "cpu"},
}
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "preempted": {"num_blocks": 24},
    "in chunks": {"num_blocks": 200, "max_num_batched_tokens": 13},
    "overlapped": {"num_blocks": 200, "async_scheduling": True},
}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.6, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "with history": {
        "temperature": 0.3,
        "seed": 7,
        "repetition_penalty": 1.02,
        "presence_penalty": 0.1,
        "min_tokens": 9,
    },
    "with logprobs": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0, "logprob_token_ids": [5, 6]},
    "of 3": {"temperature": 0.5, "seed": 8, "n": 3},
    "repeating": {
        "temperature": 0.0,
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=8, min_count=4),
    },
}


def open_llm(model: Path, numbers: str, pool: str) -> LLM:
    native_kernels()
    options = {"block_size": 4, "max_model_len": 160, "max_num_seqs": 8, "num_threads": 1}
    return LLM(model, in_process=True, **options | NUMBERS[numbers] | POOLS[pool])


@functools.cache
def expected(model: Path, numbers: str) -> dict[str, list[Completion]]:
    """Return what comes without lookup, in a roomy engine."""
    with open_llm(model, numbers, "roomy") as llm:
        return {name: generate(llm, name, 0) for name in PARAMS}


def generate(llm: LLM, name: str, num_tokens: int) -> list[Completion]:
    params = SamplingParams(max_tokens=50, ignore_eos=True, prompt_lookup_num_tokens=num_tokens, **PARAMS[name])
    return llm.generate(PROMPTS, params)


def told(done: Completion) -> list[Any]:
    """Return all that a completion tells of tokens."""
    return [
        (
            sample.token_ids,
            sample.text,
            sample.finish_reason,
            sample.stop_reason,
            sample.logprobs,
            sample.prompt_logprobs,
        )
        for sample in done.samples
    ]


MATRIX = [
    (numbers, pool) for numbers in NUMBERS for pool in POOLS if numbers in ("exact", "int8") or pool != "in chunks"
]


@pytest.mark.parametrize(("numbers", "pool"), MATRIX)
def test_outputs_are_those_without_lookup(numbers: str, pool: str, tiny_llama: Path) -> None:
    right = expected(tiny_llama, numbers)
    with open_llm(tiny_llama, numbers, pool) as llm:
        for name in PARAMS:
            found = generate(llm, name, 8)
            if numbers == "torch":  # another batch, another order of sums
                assert [one.token_ids for one in found] == [one.token_ids for one in right[name]]
            else:
                assert [told(one) for one in found] == [told(one) for one in right[name]]
            for one in found:
                assert 0 <= one.usage.accepted_draft_tokens <= one.usage.proposed_draft_tokens
        stats = llm.stats()
        assert stats.num_accepted_drafts > (50 if pool == "in chunks" else 150)  # where steps have little room
        assert (stats.num_preemptions > 0) == (pool == "preempted")


def test_the_last_token_may_be_any_of_a_run(tiny_llama: Path) -> None:
    """``max_tokens``, stop ids and stop strings cut wherever they do without lookup."""
    with open_llm(tiny_llama, "exact", "roomy") as llm:
        for prompt in PROMPTS[:2]:
            whole = llm.generate([prompt], temperature=0.0, max_tokens=40, ignore_eos=True)[0]
            ends: list[dict[str, Any]] = [{"max_tokens": count} for count in range(1, 40)]
            ends += [{"stop_token_ids": [token_id], "min_tokens": 12} for token_id in set(whole.token_ids)]
            ends += [{"stop": [whole.text[at : at + 2]], "min_tokens": 9} for at in range(12, 30) if whole.text[at:]]
            for end in ends:
                options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **end}
                one, other = (
                    llm.generate([prompt], SamplingParams(prompt_lookup_num_tokens=k, **options))[0] for k in (0, 8)
                )
                assert told(one) == told(other), end
                assert other.usage.completion_tokens == len(other.token_ids)
        assert llm.stats().num_accepted_drafts > 100


def test_the_engine_option_is_for_requests_that_do_not_say(tiny_llama: Path) -> None:
    with LLM(tiny_llama, in_process=True, num_threads=1, max_model_len=160, prompt_lookup_num_tokens=6) as llm:
        assert (llm.info.prompt_lookup_num_tokens, llm.info.prompt_lookup_step_tokens) == (6, 32)
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        silent, refusing = (
            llm.generate(PROMPTS[:1], SamplingParams(prompt_lookup_num_tokens=k, **options))[0] for k in (None, 0)
        )
    assert silent.usage.accepted_draft_tokens > 0
    assert refusing.usage.proposed_draft_tokens == 0
    assert silent.token_ids == refusing.token_ids


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Path:
    native_kernels()
    return tiny_llama


async def test_cancelled_streams_give_everything_back(model: Path, runtime_root: Path) -> None:
    """Left at every place of a run of tokens that arrive together; the others do not notice."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "prompt_lookup_num_tokens": 8}
    async with AsyncLLM(model, num_threads=1, max_model_len=160) as llm:
        whole = await llm.generate(PROMPTS[0], **options)
        assert whole.usage.accepted_draft_tokens > 10

        async def leave_after(count: int) -> None:
            ids: list[int] = []
            stream = llm.stream(PROMPTS[0], **options)
            async for delta in stream:
                ids += delta.token_ids
                if len(ids) >= count:
                    break
            await stream.aclose()
            assert ids == whole.token_ids[: len(ids)]
            assert stream.usage is not None
            assert stream.usage.accepted_draft_tokens <= stream.usage.proposed_draft_tokens

        async with anyio.create_task_group() as group:
            for count in range(1, 30, 2):
                group.start_soon(leave_after, count)
            again = await llm.generate(PROMPTS[0], **options)
        assert again.token_ids == whole.token_ids
        await llm.drain()
        stats = await llm.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, llm.info.num_blocks)


async def test_a_scripted_engine_takes_drafts(tmp_path: Path) -> None:
    """A reply that repeats arrives whole, in fewer steps than it has tokens."""
    reply = "one two three four " * 6
    options = scripted_options(replies={"count": reply})
    async with AsyncLLM(write_tiny_checkpoint(tmp_path), prompt_lookup_num_tokens=8, **options) as llm:
        done = await llm.generate("count", logprobs=0)
        history = (await llm.collective_rpc("history"))[0]
    assert done.text == reply
    assert done.logprobs is not None
    assert [one.chosen.token_id for one in done.logprobs] == done.token_ids
    assert len(history) < len(done.token_ids) - 40
    assert sum(len(ids) for step in history for ids in step["more_token_ids"].values()) > 40
