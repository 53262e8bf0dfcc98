"""A seed gives the ids it has always given: alone, in a batch, after preemption, in chunks, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, Completion, SamplingParams
from asyncllm.kernels import build, library
from tests.support.pinned import pinned_requests, seeded_ids, write_pinned_llama

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "all at once": {"num_blocks": 1024},
    "one at a time": {"num_blocks": 1024, "max_num_seqs": 1},
    "five at a time": {"num_blocks": 1024, "max_num_seqs": 5},
    "chunks of 7": {"num_blocks": 1024, "max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 30, "block_size": 4},
    "no prefix cache": {"num_blocks": 1024, "enable_prefix_caching": False},
    "two threads": {"num_blocks": 1024, "num_threads": 2},
    "torch": {"num_blocks": 1024, "attention_backend": "cpu"},
    "another process": {"num_blocks": 1024, "in_process": False},
}


@pytest.fixture(scope="module")
def pinned_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pinned_llama(tmp_path_factory.mktemp("pinned"))


def ids_of(completions: Sequence[Completion]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in completion.samples] for completion in completions]


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_r47_the_ids_of_a_seed_are_those_of_yesterday(options: dict[str, Any], pinned_llama: Path) -> None:
    prompts, params = zip(*pinned_requests(), strict=True)
    expected = seeded_ids("tiny")
    with LLM(pinned_llama, **{"num_threads": 1, "max_model_len": 128, "in_process": True, **options}) as llm:
        assert ids_of(llm.generate(prompts, params)) == expected
        assert ids_of(llm.generate(prompts[::-1], params[::-1])) == expected[::-1]  # the prefixes are cached now
        assert ids_of([llm.generate([prompts[i]], [params[i]])[0] for i in range(0, 64, 9)]) == expected[::9]
        assert (llm.stats().num_preemptions > 0) == (options["num_blocks"] < 100)


@pytest.mark.parametrize("kernels", [library.OFF, *build.isas()])
def test_r47_on_every_instruction_set(kernels: str, pinned_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels not in (library.OFF, *library.usable()):
        pytest.skip(f"{kernels} is not compiled or does not run here")
    monkeypatch.setenv("ASYNCLLM_KERNELS", kernels)
    prompts, params = zip(*pinned_requests(), strict=True)
    with LLM(pinned_llama, num_threads=1, max_model_len=128, in_process=True, num_blocks=1024) as llm:
        assert ids_of(llm.generate(prompts, params)) == seeded_ids("tiny")


def test_the_pinned_ids_are_worth_pinning() -> None:
    """Many tokens, few of them equal, and samples that differ."""
    found = seeded_ids("tiny")
    samples = [tuple(sample) for request in found for sample in request]
    assert len(samples) == len(set(samples)) == 56 + 8 * 3
    assert all(len(sample) == 12 for sample in samples)
    assert len({token_id for sample in samples for token_id in sample}) > 150


# ---------------------------------------------------------------------------------------------------------- SmolLM2
TEXTS = ["The capital of France is", "Once upon a time, there was a", "def fibonacci(n):\n    ", "naïve café — 東京 🙂"]
SMOLLM2: dict[str, dict[str, Any]] = {
    "64 at once": {"copies": 16},
    "one at a time in chunks": {"max_num_seqs": 1, "max_num_batched_tokens": 5},
    "preempted on two threads": {"num_blocks": 14, "block_size": 4, "num_threads": 2},
    "another process": {"in_process": False},
}


def smollm2_params() -> list[SamplingParams]:
    fields: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"temperature": 0.6, "min_p": 0.05}]
    return [SamplingParams(seed=100 + i, max_tokens=16, **{"temperature": 1.0, **one}) for i, one in enumerate(fields)]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("options", SMOLLM2.values(), ids=SMOLLM2)
def test_r47_also_with_a_real_model(options: dict[str, Any], smollm2_gguf: Path) -> None:
    options = {"num_threads": 1, "max_model_len": 64, "in_process": True, **options}
    copies = options.pop("copies", 1)
    with LLM(smollm2_gguf, **options) as llm:
        done = llm.generate(TEXTS * copies, smollm2_params() * copies)
        assert ids_of(done) == seeded_ids("smollm2") * copies
        assert (llm.stats().num_preemptions > 0) == (options.get("num_blocks") == 14)
