"""Bad words and requested log-probabilities of SmolLM2-135M-Instruct against those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import LLM, Completion
from tests.support import models

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = ["The capital of France is", "Once upon a time, there was a"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, in_process=True, num_threads=1, max_model_len=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Completion]:
    return llm.generate(PROMPTS, **GREEDY)


def test_case103_bad_words_give_the_tokens_of_transformers(
    llm: LLM, plain: list[Completion], smollm2_folder: Path
) -> None:
    """Words of one and of several tokens, taken from what the model says without them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    words = sorted({word.strip(".,!?\n") for done in plain for word in done.text.split() if word[0].isalpha()})[::2]
    words.append("once upon a time")
    ids = [tokenizer.encode(text).ids for word in words for text in (word, " " + word)]
    assert {len(word) for word in ids} >= {1, 2}
    bound = llm.generate(PROMPTS, bad_words=words, **GREEDY)
    for before, after in zip(plain, bound, strict=True):
        assert after.token_ids != before.token_ids
        prompt = torch.tensor([before.prompt_token_ids])
        expected = models.reference(smollm2_folder).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            bad_words_ids=ids,
        )
        assert after.token_ids == expected[0, prompt.shape[1] :].tolist()
        assert not {f" {word} " for word in words} & {f" {word} " for word in after.text.split()}


def test_requested_logprobs_are_those_of_transformers(llm: LLM, smollm2_folder: Path) -> None:
    ids = [0, 260, 49151, 1000, 7]
    for done in llm.generate(PROMPTS, logprob_token_ids=ids, **GREEDY):
        expected = models.log_probabilities(smollm2_folder, [*done.prompt_token_ids, *done.token_ids])
        for row, found in zip(expected[len(done.prompt_token_ids) - 1 : -1], done.logprobs or [], strict=True):
            assert [one.token_id for one in found.requested] == ids
            values = [one.logprob for one in found.requested]
            torch.testing.assert_close(torch.tensor(values), row[ids], atol=1e-4, rtol=1e-5)
            ranks = [int((row > row[token]).sum()) + 1 for token in ids]
            assert all(abs(one.rank - rank) <= 3 for one, rank in zip(found.requested, ranks, strict=True))
