"""Prompt lookup with SmolLM2-135M-Instruct: the same tokens, texts and logprobs as without, and fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import LLM, Completion, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT = (
    "All legislative Powers herein granted shall be vested in a Congress of the United States, which shall consist of a"
)
CODE = (
    "def total(rows):\n    count = 0\n    for row in rows:\n        count += row.price * row.amount\n    return count\n"
)
PROMPTS = [
    f"{TEXT} Senate and House.\n\n" * 3 + TEXT[:40],
    f"<|im_start|>user\nRename `row` to `item` in this code:\n\n{CODE}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a violin.<|im_end|>\n<|im_start|>assistant\n",
]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "seeded": {"temperature": 0.4, "seed": 3},
    "three samples": {"temperature": 0.5, "top_p": 0.9, "seed": 4, "n": 3},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.1, "bad_words": ["House"]},
    "stops": {"temperature": 0.0, "stop": ["Congress of the", "count +="]},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "as stored": {},
    "dequantized": {"folder": True},
    "int8": {"folder": True, "quantization": "int8"},
    "overlapped, in chunks, with preemptions": {
        "async_scheduling": True, "max_num_batched_tokens": 48, "num_blocks": 24,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=list(WEIGHTS))
def llm(request: pytest.FixtureRequest, smollm2_gguf: Path, smollm2_folder: Path) -> Iterator[LLM]:
    options = dict(WEIGHTS[request.param])
    model = smollm2_folder if options.pop("folder", False) else smollm2_gguf
    with LLM(model, in_process=True, num_threads=1, max_model_len=320, **options) as llm:
        yield llm


def told(done: Completion) -> list[Any]:
    return [(one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in done.samples]


@pytest.mark.parametrize("name", list(PARAMS))
def test_outputs_are_those_without_lookup(llm: LLM, name: str) -> None:
    without, with_lookup = (
        llm.generate(PROMPTS, SamplingParams(max_tokens=48, prompt_lookup_num_tokens=k, **PARAMS[name])) for k in (0, 8)
    )
    assert [told(one) for one in with_lookup] == [told(one) for one in without]
    if name != "penalties":
        assert with_lookup[0].usage.accepted_draft_tokens > 0


def test_a_copy_takes_less_than_two_thirds_of_the_steps(llm: LLM) -> None:
    num_steps: list[int] = []
    for num_tokens in (0, 8):
        before = llm.stats().num_steps
        llm.generate(PROMPTS[:1], temperature=0.0, max_tokens=48, prompt_lookup_num_tokens=num_tokens)
        num_steps.append(llm.stats().num_steps - before)
    assert 3 * num_steps[1] < 2 * num_steps[0]
