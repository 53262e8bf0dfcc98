"""On the compiled kernels the logits at a position are a function of the tokens before it, bit for bit.

The whole engine with a tiny model, in this process. Whatever a step computes is recorded under the token ids that led
to it and must be what a lone request gave, computed in one chunk, on one thread, without a cache. The prompts cross
the borders of KV blocks and of the attention's 256-token chunks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, SamplingParams
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.step_result import PreparedStep
from tests.support.kernels import native_kernels

NUM_TOKENS = 40
NEIGHBOURS = (1, 2, 7, 32, 64)
LONGEST = 300
CHUNKS = {"whole prompts": 1024, "chunks of 64": 64, "chunks of 13": 13}
POOLS = {"roomy": 2000, "preempted": (LONGEST + NUM_TOKENS) // 16 + 2}
"""KV blocks of 16 tokens: enough for all, or for one long request alone."""

NUMBERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"quantization": "int8"},
    "int4, keys and values in int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "bfloat16 keys and values, blocks of 5": {"kv_cache_dtype": "bfloat16", "block_size": 5},
}

Logits = dict[bytes, bytes]
"""The bits of the logits by the token ids before them."""


@functools.cache
def prompts() -> list[list[int]]:
    """Return prompts of 1 … 300 tokens; every third begins like the one before it."""
    chance = random.Random(4)
    made = [[chance.randrange(256) for _ in range(LONGEST)]]
    for i in range(1, max(NEIGHBOURS)):
        kept = made[-1][: 37 + i] if i % 3 == 0 else []
        fresh = [chance.randrange(256) for _ in range(1 + 53 * i % (LONGEST - 130))]
        made.append((kept + fresh)[:LONGEST])
    return made


@contextmanager
def recorded(model: Path, numbers: str, *, num_blocks: int, **options: Any) -> Iterator[tuple[LLM, Logits]]:
    """Yield an engine with room for ``num_blocks`` times 16 tokens, and what it computes while it works."""
    options |= {"block_size": 16, "max_model_len": LONGEST + NUM_TOKENS, "max_num_seqs": 64, **NUMBERS[numbers]}
    options["num_blocks"] = num_blocks * 16 // options["block_size"]
    found: Logits = {}
    sample = ModelRunner._sample  # pyright: ignore[reportPrivateUsage]

    def record(runner: ModelRunner, prepared: PreparedStep, hidden: torch.Tensor) -> Any:
        draws = prepared.draws
        if draws is not None:
            slots, num_tokens = draws.history.slots, draws.history.num_tokens
            places = runner._inputs["last_tokens"][: len(slots)]  # pyright: ignore[reportPrivateUsage]
            last = hidden if draws.is_batch else hidden.index_select(0, places)
            for slot, count, logits in zip(slots, num_tokens, runner.model.compute_logits(last), strict=True):
                tokens = runner.batch.tokens[slot, :count]
                bits = logits.numpy().tobytes()
                assert found.setdefault(tokens.numpy().tobytes(), bits) == bits
        return sample(runner, prepared, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_sample", record)
        with LLM(model, in_process=True, **options) as llm:
            assert llm.info.attention_backend == "native"
            found.clear()  # the warm-up
            yield llm, found


def generate(llm: LLM, count: int, **options: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **options)
    for completion in llm.generate(prompts()[:count], params):
        assert len(completion.token_ids) == NUM_TOKENS


@functools.cache
def lone(model: Path, numbers: str) -> Logits:
    """Return what the prompts give one after the other, on one thread, without a cache."""
    with recorded(model, numbers, num_blocks=100, num_threads=1, enable_prefix_caching=False) as (llm, found):
        for prompt in prompts():
            llm.generate([prompt], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert llm.stats().num_preemptions == 0
    assert len(found) == len(prompts()) * NUM_TOKENS
    assert len(set(found.values())) > len(found) / 2  # they are worth comparing
    return found


MATRIX = [
    pytest.param(count, chunk, pool, threads, "exact", id=f"{count}-{chunk}-{pool}-{threads} threads")
    for count in NEIGHBOURS
    for chunk in CHUNKS
    for pool in POOLS
    for threads in (1, 2)
]
"""All of it in the exact numbers, the hardest corner in the others."""
MATRIX += [
    pytest.param(64, chunk, pool, 2, numbers, id=f"64-{chunk}-{pool}-{numbers}")
    for numbers in NUMBERS
    if numbers != "exact"
    for chunk, pool in (("whole prompts", "roomy"), ("chunks of 13", "preempted"))
]


@pytest.mark.parametrize(("count", "chunk", "pool", "num_threads", "numbers"), MATRIX)
def test_the_logits_are_those_of_a_lone_request(
    count: int, chunk: str, pool: str, num_threads: int, numbers: str, tiny_llama: Path
) -> None:
    """Cold, then with cached prefixes."""
    native_kernels()
    expected = lone(tiny_llama, numbers)
    options = {"max_num_batched_tokens": CHUNKS[chunk], "num_blocks": POOLS[pool], "num_threads": num_threads}
    with recorded(tiny_llama, numbers, **options) as (llm, found):
        for hits in (False, True):
            found.clear()
            generate(llm, count)
            assert len(found) == count * NUM_TOKENS
            assert found.items() <= expected.items()
            stats = llm.stats()
            assert stats.prefix_hits > 0 or not hits
        if pool == "roomy":
            assert stats.num_preemptions == 0
        elif count >= 32:  # fewer of them wait until there is room
            assert stats.num_preemptions > 0


@pytest.mark.parametrize("chunk", ["whole prompts", "chunks of 13"])
@pytest.mark.parametrize("count", [1, 7, 32])
def test_the_logits_after_drafts_are_those_of_a_lone_request(count: int, chunk: str, tiny_llama: Path) -> None:
    """What follows wrong drafts is nobody's output, and not looked at."""
    native_kernels()
    expected = lone(tiny_llama, "exact")
    options = {"max_num_batched_tokens": CHUNKS[chunk], "num_blocks": POOLS["roomy"], "num_threads": 2}
    options["prompt_lookup_step_tokens"] = 512  # in steps of 32 rows too
    with recorded(tiny_llama, "exact", **options) as (llm, found):
        generate(llm, count, prompt_lookup_num_tokens=8)
        right = found.keys() & expected.keys()
        assert len(right) == count * NUM_TOKENS
        assert all(found[tokens] == expected[tokens] for tokens in right)
        assert chunk != "whole prompts" or llm.stats().num_accepted_drafts > 0
