"""Log-probabilities of SmolLM2-135M-Instruct, prompt and output: within 1e-4 of transformers' log-softmax (float32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM
from tests.support.logprobs import check_completion

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "The capital of France is",
    "naïve café — 東京 🙂",
    "<|im_start|>user\nCount from 10 down to 1.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize("source", ["smollm2_gguf", "smollm2_folder"])
@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "top_p": 0.95}], ids=str)
def test_b95_logprobs_equal_transformers(
    source: str, way: dict[str, Any], smollm2_folder: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    with LLM(path, in_process=True, num_threads=1, max_model_len=128, max_num_batched_tokens=11) as llm:
        for done in llm.generate(PROMPTS, max_tokens=20, logprobs=5, prompt_logprobs=2, ignore_eos=True, **way):
            check_completion(smollm2_folder, done, num_top=5, num_prompt_top=2)
