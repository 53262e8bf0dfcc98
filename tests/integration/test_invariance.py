"""What a request's tokens do not depend on: batch, chunks, cached prefixes, preemption, hash clashes, backend.

The whole engine with a tiny model, in this process, so that each configuration costs a tenth of a second. The tokens
that are right come from transformers (greedy) or from the plainest configuration (drawn with a seed).
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLM, Completion, FinishReason, SamplingParams
from asyncllm.core.block_hash import hash_block
from asyncllm.core.scheduler import Scheduler
from asyncllm.errors import PromptTooLongError, RequestError, RequestFailedError
from asyncllm.kernels import library
from tests.support import models

NUM_TOKENS = 24
ROOMY = {"num_blocks": 512}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it comes": ROOMY,
    "no prefix cache": {**ROOMY, "enable_prefix_caching": False},
    "chunks of 1": {**ROOMY, "max_num_batched_tokens": 1},
    "chunks of 7": {**ROOMY, "max_num_batched_tokens": 7},
    "chunks of 13 at most 5 each": {**ROOMY, "max_num_batched_tokens": 13, "long_prefill_token_threshold": 5},
    "one at a time": {**ROOMY, "max_num_seqs": 1},
    "three at a time": {**ROOMY, "max_num_seqs": 3},
    "blocks of 1": {"num_blocks": 4000, "block_size": 1},
    "blocks of 5": {"num_blocks": 1000, "block_size": 5},
    "forced preemption": {"num_blocks": 9},
    "forced preemption in chunks": {"num_blocks": 34, "block_size": 4, "max_num_batched_tokens": 11},
    "forced preemption without a cache": {"num_blocks": 9, "enable_prefix_caching": False},
    "torch": {**ROOMY, "attention_backend": "cpu"},
    "torch under forced preemption in chunks": {
        "num_blocks": 9,
        "max_num_batched_tokens": 11,
        "attention_backend": "cpu",
    },
    "the reference backend": {**ROOMY, "attention_backend": "reference"},
    "two threads": {**ROOMY, "num_threads": 2},
    "overlapped": {**ROOMY, "async_scheduling": True},
    "overlapped in chunks of 7": {**ROOMY, "async_scheduling": True, "max_num_batched_tokens": 7},
    "overlapped, three at a time": {**ROOMY, "async_scheduling": True, "max_num_seqs": 3},
    "overlapped under forced preemption": {"async_scheduling": True, "num_blocks": 9},
    "overlapped under forced preemption without a cache": {
        "async_scheduling": True,
        "num_blocks": 9,
        "enable_prefix_caching": False,
    },
    "overlapped on torch": {**ROOMY, "async_scheduling": True, "attention_backend": "cpu"},
}


@contextmanager
def started(model: Path, **options: Any) -> Iterator[LLM]:
    with LLM(model, in_process=True, **{"num_threads": 1, "max_model_len": 256, **options}) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == llm.info.num_blocks


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@functools.cache
def prompts(count: int = 30, num_shared: int = 37) -> list[list[int]]:
    """Return prompts that begin alike, in two of three cases, and go on differently for 1 … 40 tokens."""
    chance = random.Random(count)
    shared = [chance.randrange(256) for _ in range(num_shared)]
    return [(shared if i % 3 else []) + [chance.randrange(256) for _ in range(1 + (11 * i) % 40)] for i in range(count)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = [
    SamplingParams(temperature=1.0, seed=i, top_k=i % 3 * 20, top_p=1.0 - i % 4 * 0.1, max_tokens=12, ignore_eos=True)
    for i in range(30)
]


@pytest.fixture(scope="module")
def expected_greedy(tiny_llama: Path) -> list[list[int]]:
    return [models.greedy(tiny_llama, prompt, NUM_TOKENS) for prompt in prompts()]


@pytest.fixture(scope="module")
def expected_drawn(tiny_llama: Path) -> list[list[int]]:
    """Each alone, with no cache, a prompt in one step."""
    with started(tiny_llama, **ROOMY, max_num_seqs=1, enable_prefix_caching=False) as llm:
        return tokens(llm.generate(prompts(), DRAWN))


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_r48_r66_r70_tokens_do_not_depend_on_the_configuration(
    options: dict[str, Any], tiny_llama: Path, expected_greedy: list[list[int]], expected_drawn: list[list[int]]
) -> None:
    """Twice: cold, then with what is cached (or was evicted)."""
    with started(tiny_llama, **options) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts(), GREEDY)) == expected_greedy
            assert tokens(llm.generate(prompts(), DRAWN)) == expected_drawn
        stats = llm.stats()
        assert (stats.num_preemptions > 0) == (options["num_blocks"] < 40)
        assert (stats.prefix_hits > 0) == options.get("enable_prefix_caching", True)


STORED_KV = {
    "as it comes": ROOMY,
    "no prefix cache": {**ROOMY, "enable_prefix_caching": False},
    "chunks of 7": {**ROOMY, "max_num_batched_tokens": 7},
    "forced preemption": {"num_blocks": 9},
    "two threads": {**ROOMY, "num_threads": 2},
}


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "float16", "int8"])
def test_r66_keys_and_values_of_any_dtype_change_nothing_but_their_own_rounding(
    kv_cache_dtype: str, tiny_llama: Path
) -> None:
    """Drawn tokens, which tell one logit from the next better than greedy ones."""
    alone = {**ROOMY, "max_num_seqs": 1, "enable_prefix_caching": False, "kv_cache_dtype": kv_cache_dtype}
    if library.available().isa is None:
        pytest.skip("needs the compiled kernels")
    with started(tiny_llama, **alone) as llm:
        assert llm.info.kv_cache_dtype == kv_cache_dtype
        expected = tokens(llm.generate(prompts(), DRAWN))
    for name, options in STORED_KV.items():
        with started(tiny_llama, **options, kv_cache_dtype=kv_cache_dtype) as llm:
            for _ in range(2):
                assert tokens(llm.generate(prompts(), DRAWN)) == expected, name


@pytest.fixture(scope="module")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_tiny_gemma3(tmp_path_factory.mktemp("tiny-gemma3"))


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_r48_r66_r70_nor_do_those_of_a_model_with_sliding_windows(options: dict[str, Any], tiny_gemma3: Path) -> None:
    expected = [models.greedy(tiny_gemma3, prompt, NUM_TOKENS) for prompt in prompts()]
    with started(tiny_gemma3, **options) as llm:
        for _ in range(2):  # cold, then with what is cached
            assert tokens(llm.generate(prompts(), GREEDY)) == expected
        stats = llm.stats()
        assert (stats.num_preemptions > 0) == (options["num_blocks"] < 40)
        assert (stats.prefix_hits > 0) == options.get("enable_prefix_caching", True)


def test_r70_the_second_time_prefixes_are_hit_and_evicted_ones_are_not(tiny_llama: Path) -> None:
    with started(tiny_llama, num_blocks=16) as llm:
        long = prompts()[4][:37] + [7] * 4
        first, second = (llm.generate([long], GREEDY)[0] for _ in range(2))
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 32)
        llm.generate([[1] * 250], max_tokens=5, temperature=0.0)  # takes all blocks
        third = llm.generate([long], GREEDY)[0]
        assert third.usage.cached_tokens == 0
        assert first.token_ids == second.token_ids == third.token_ids == models.greedy(tiny_llama, long, NUM_TOKENS)


def modulo_three(parent: bytes, content: bytes) -> bytes:
    return bytes([hash_block(parent, content)[0] % 3])


def test_r69_clashing_hashes_take_no_wrong_block(
    tiny_llama: Path, expected_greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncllm.core.engine_core.Scheduler", functools.partial(Scheduler, hash_function=modulo_three))
    with started(tiny_llama, num_blocks=200, block_size=4) as llm:
        for _ in range(2):
            assert tokens(llm.generate(prompts()[:20], GREEDY)) == expected_greedy[:20]
        assert llm.stats().prefix_hits > 0


def test_r65_two_streams_in_a_pool_for_one_and_a_half(tiny_llama: Path) -> None:
    """Ten blocks each in the end: each is preempted three times at most, in no more steps than 1/0.6 of one by one."""
    asked = [prompt[:32] for prompt in (prompts()[1], [9] * 32)]
    params = SamplingParams(temperature=0.0, max_tokens=8 * 16, ignore_eos=True)
    with started(tiny_llama, num_blocks=15) as llm:
        done = llm.generate(asked, params)
        assert tokens(done) == [models.greedy(tiny_llama, prompt, 8 * 16) for prompt in asked]
        preemptions = [completion.usage.num_preemptions for completion in done]
        assert sum(preemptions) >= 1
        assert max(preemptions) <= 3
        assert llm.stats().num_steps <= 2 * 8 * 16 / 0.6


def test_r63_a_request_that_grows_beyond_the_pool_ends_with_all_its_tokens(tiny_llama: Path) -> None:
    prompt = prompts()[1][:30]
    with started(tiny_llama, num_blocks=4) as llm:  # 64 tokens have a place; the last token needs none
        (completion,) = llm.generate([prompt], temperature=0.0, ignore_eos=True)
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids == models.greedy(tiny_llama, prompt, 35)
        assert completion.usage.num_preemptions == 0
        assert llm.stats().num_steps == 35


# ------------------------------------------------------------------------------------------------------------- limits
SMALL = {"max_model_len": None, "num_blocks": None, "kv_cache_bytes": 100_000}  # of tokens that take 512 bytes each


def test_r55_a_length_that_memory_lowers_is_the_one_that_is_checked(tiny_llama: Path) -> None:
    with started(tiny_llama, **SMALL) as llm:
        limit = llm.info.max_model_len
        assert limit < 512
        with pytest.raises(RequestError, match=str(limit)) as caught:
            llm.generate([[65] * (limit + 1)])
        assert caught.value.limit == limit - 1
        (completion,) = llm.generate([[65] * (limit - 1)], temperature=0.0)
        assert len(completion.token_ids) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_r55_also_for_a_stream_that_starts_the_engine(anyio_backend: object, tiny_llama: Path) -> None:
    llm = AsyncLLM(tiny_llama, num_threads=1, **SMALL)
    stream = llm.stream([65] * 500)  # fits the 512 positions of the model
    with pytest.raises(PromptTooLongError):
        await anext(stream)
    assert len((await llm.generate([65] * 20, max_tokens=3, ignore_eos=True)).token_ids) == 3
    await llm.aclose()


@pytest.fixture(scope="module")
def padded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head has 12 rows more than the tokenizer has ids, and prefers them."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = models.write_tiny_llama(tmp_path_factory.mktemp("padded"), vocab_size=272, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][260:] = weights["lm_head.weight"][:12] * 50
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    log_probabilities = models.log_probabilities(folder, [65, 66, 67])
    assert torch.all(log_probabilities.argmax(-1) >= 260)  # transformers would draw them
    return folder


def test_r58_padding_rows_of_the_head_are_never_drawn(padded_llama: Path) -> None:
    with started(padded_llama, **ROOMY) as llm:
        assert llm.info.vocab_size == 260
        params = [SamplingParams(temperature=float(i % 3), seed=i, max_tokens=20, ignore_eos=True) for i in range(50)]
        done = llm.generate([[65, 66, i] for i in range(50)], params)
        drawn = [token_id for completion in done for token_id in completion.token_ids]
        assert len(drawn) == 1000
        assert max(drawn) < 260
        (completion,) = llm.generate([[65, 66]], max_tokens=4, logprobs=64, ignore_eos=True)
        assert completion.logprobs is not None
        assert max(top.token_id for entry in completion.logprobs for top in entry.top) < 260
        with pytest.raises(RequestError):
            llm.generate([[261]])


@pytest.mark.parametrize("overlapped", [False, True], ids=["in turn", "overlapped"])
def test_requests_whose_numbers_are_not_finite_fail_alone(overlapped: bool, tmp_path: Path) -> None:
    """Their last steps, and who found their beginnings in the cache, are out when that is found."""
    from safetensors.torch import load_file, save_file

    path, poison = models.write_tiny_llama(tmp_path, tie_word_embeddings=False), 200
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    good = [[7 + i] * 20 for i in range(6)]
    bad = [[*good[i], poison, *[i] * 30] for i in range(3)]
    expected = [models.greedy(path, prompt, 12) for prompt in good]
    assert not any(poison in token_ids for token_ids in expected)

    async def main() -> None:
        options: dict[str, Any] = {"num_threads": 1, "num_blocks": 512, "max_num_batched_tokens": 24}
        async with AsyncLLM(path, async_scheduling=overlapped, **options) as llm:

            async def one(prompt: list[int]) -> list[int] | str:
                try:
                    return (await llm.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True)).token_ids
                except RequestFailedError as error:
                    return error.message

            for _ in range(2):  # the second time with what is cached
                found = await asyncio.gather(*map(one, [*bad, *good, *bad]))
                assert all("not finite" in str(one) for one in found[:3] + found[9:])
                assert found[3:9] == expected
            assert (await llm.stats()).num_free_blocks == llm.info.num_blocks

    asyncio.run(main())
