"""Log-probabilities equal transformers' log-softmax within 1e-4 in float32, for every architecture with a tiny model.

They are those of the model: temperature, filters and penalties do not change them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM
from tests.support import models
from tests.support.logprobs import check_completion

FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": models.write_tiny_llama,
    "gemma3": models.write_tiny_gemma3,
    "opt": models.write_tiny_opt,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 12, "block_size": 4},
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 50},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.5, "logit_bias": {65: 5.0}},
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_b95_logprobs_of_prompt_and_output_equal_transformers(options: dict[str, Any], folder: Path) -> None:
    chance = random.Random(95)
    prompts = [[chance.randrange(256) for _ in range(9 + 3 * i)] for i in range(len(WAYS))]
    asked = {"max_tokens": 16, "ignore_eos": True, "logprobs": 4, "prompt_logprobs": 3, "logprob_token_ids": [9, 200]}
    with LLM(folder, in_process=True, num_threads=1, max_model_len=128, **{"num_blocks": 512, **options}) as llm:
        done = [
            llm.generate([prompt], seed=i, **way, **asked)[0]
            for i, (prompt, way) in enumerate(zip(prompts, WAYS, strict=True))
        ]
        done += llm.generate(prompts * 2, seed=1, temperature=1.0, **asked)
        assert (llm.stats().num_preemptions > 0) == ("block_size" in options)
    for completion in done:
        check_completion(folder, completion, num_top=4, num_prompt_top=3, requested=[9, 200])
