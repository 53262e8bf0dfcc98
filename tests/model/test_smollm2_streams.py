"""SmolLM2-135M-Instruct behind AsyncLLM: the greedy tokens of transformers, whatever else the engine does meanwhile.

Text goes in, so the tokenizer of the GGUF is held against that of the converted folder on the way. Logits are compared
in ``test_smollm2_parity``, within a stated tolerance; here it is tokens, and all of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncllm import AsyncLLM, Completion
from tests.support import models
from tests.support.scripted import assert_settled

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"]),
]

Check = Callable[[Sequence[Completion]], None]

NUM_TOKENS = 64
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}

SHARED = """\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
"""
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "naïve café — 東京 🙂",
    SHARED + "What is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    SHARED + "Count from 10 down to 1.<|im_end|>\n<|im_start|>assistant\n",
    SHARED + "Write a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def prompt_ids(smollm2_folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def check(smollm2_folder: Path, prompt_ids: list[list[int]]) -> Callable[[Sequence[Completion]], None]:
    """Assert that these are the greedy completions of all prompts; transformers is asked once for each answer."""

    @functools.cache
    def corrected(prompt: tuple[int, ...], found: tuple[int, ...]) -> list[int]:
        return models.corrected(smollm2_folder, prompt, found)

    def check(completions: Sequence[Completion]) -> None:
        assert [completion.prompt_token_ids for completion in completions] == prompt_ids
        for ids, completion in zip(prompt_ids, completions, strict=True):
            assert len(completion.token_ids) == NUM_TOKENS
            assert completion.token_ids == corrected(tuple(ids), tuple(completion.token_ids)), completion.text

    return check


async def gather(llm: AsyncLLM, texts: Sequence[str]) -> list[Completion]:
    results: dict[int, Completion] = {}

    async def one(index: int) -> None:
        results[index] = await llm.generate(texts[index], **GREEDY)

    async with anyio.create_task_group() as group:
        for index in range(len(texts)):
            group.start_soon(one, index)
    return [results[index] for index in range(len(texts))]


async def test_alone_then_with_a_cached_prefix(smollm2_gguf: Path, check: Check, anyio_backend: object) -> None:
    async with AsyncLLM(smollm2_gguf, max_model_len=512, num_threads=1) as llm:
        check([await llm.generate(text, **GREEDY) for text in PROMPTS])
        again = await gather(llm, PROMPTS)
        check(again)
        assert all(completion.usage.cached_tokens >= 16 for completion in again[5:])
        await assert_settled(llm)


async def test_together_from_a_folder_without_a_prefix_cache(
    smollm2_folder: Path, check: Check, anyio_backend: object
) -> None:
    async with AsyncLLM(smollm2_folder, max_model_len=512, enable_prefix_caching=False) as llm:
        check(await gather(llm, PROMPTS))


@pytest.mark.parametrize(("backend", "block_size"), [("auto", 16), ("cpu", 5)])
async def test_in_chunks_of_odd_size(
    smollm2_gguf: Path, check: Check, anyio_backend: object, backend: str, block_size: int
) -> None:
    async with AsyncLLM(
        smollm2_gguf,
        max_model_len=512,
        max_num_batched_tokens=13,
        long_prefill_token_threshold=7,
        block_size=block_size,
        num_threads=1,
        attention_backend=backend,
    ) as llm:
        check(await gather(llm, PROMPTS))


async def test_under_forced_preemption(smollm2_gguf: Path, check: Check, anyio_backend: object) -> None:
    async with AsyncLLM(
        smollm2_gguf, max_model_len=160, num_blocks=24, num_threads=1
    ) as llm:  # they need 50 blocks together
        done = await gather(llm, PROMPTS)
        check(done)
        assert sum(completion.usage.num_preemptions for completion in done) > 0
        assert (await llm.stats()).num_preemptions > 0
        await assert_settled(llm)


async def test_beside_neighbours_that_are_cancelled(smollm2_gguf: Path, check: Check, anyio_backend: object) -> None:
    chance = random.Random(0)

    async def neighbour(llm: AsyncLLM, number: int) -> None:
        num_tokens = chance.randrange(1, 20)
        async with llm.stream(f"Neighbour {number} says", seed=number, ignore_eos=True) as stream:
            async for _ in stream:
                num_tokens -= 1
                if not num_tokens:
                    break

    options = {"max_model_len": 512, "max_num_seqs": 16, "num_threads": 1}
    async with AsyncLLM(smollm2_gguf, **options) as llm, anyio.create_task_group() as group:
        for number in range(24):
            group.start_soon(neighbour, llm, number)
        check(await gather(llm, PROMPTS))
        group.cancel_scope.cancel()
        await assert_settled(llm)
