"""What bad words do to logits: which token is excluded follows from the output alone, at each step anew."""

from __future__ import annotations

import pytest
import torch

from tests.support.sampling import sample, sampling

VOCAB = 12
BEST = 7


def drawn(words: list[list[int]], output: list[int], *, prompt: list[int] | None = None, **fields: object) -> int:
    """Return the greedy token of a row whose most likely tokens are 7, 6, 5, … 0."""
    logits = torch.arange(VOCAB, dtype=torch.float32)[None].remainder(BEST + 1)
    params = sampling(bad_words=words, **fields)
    return int(sample(logits, [params], histories=[(prompt or [1], output)]).token_ids)


def test_a_word_of_one_token_is_never_drawn() -> None:
    assert drawn([[7]], []) == 6
    assert drawn([[7], [6], [5]], [7, 6]) == 4


def test_the_last_token_of_a_longer_word_is_excluded_after_those_before_it() -> None:
    assert drawn([[3, 4, 7]], [9, 3, 4]) == 6
    assert drawn([[3, 4, 7]], [3, 4, 9]) == 7
    assert drawn([[3, 4, 7]], [9, 4]) == 7


def test_a_word_may_repeat_its_own_tokens() -> None:
    assert drawn([[7, 7, 7]], [7, 7]) == 6
    assert drawn([[7, 7, 7]], [7]) == 7


def test_tokens_of_the_prompt_are_no_part_of_a_word() -> None:
    assert drawn([[3, 7]], [], prompt=[1, 3]) == 7
    assert drawn([[2, 3, 7]], [3], prompt=[1, 2]) == 7
    assert drawn([[3, 7]], [3], prompt=[1, 2]) == 6


def test_a_word_longer_than_all_that_there_is() -> None:
    assert drawn([[1] * 30 + [7], [6]], [1, 1]) == 7


def test_of_two_words_that_end_alike_either_excludes() -> None:
    assert drawn([[1, 7], [2, 7]], [2]) == 6
    assert drawn([[2, 7], [1, 7]], [2]) == 6
    assert drawn([[2, 7], [1, 7]], [3]) == 7


def test_neither_bias_nor_penalties_bring_a_bad_word_back() -> None:
    assert drawn([[7]], [7, 7], logit_bias={7: 100.0}, presence_penalty=-2.0, frequency_penalty=-2.0) == 6
    assert drawn([[7]], [7], allowed_token_ids=[7, 3], repetition_penalty=0.1) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_have_words_of_their_own(temperature: float) -> None:
    """In one batch, beside rows without any; each as if it were alone."""
    words = [[[7]], [], [[5, 7], [6]], [[5, 5, 7]], [[3, 7]]]
    params = [sampling(bad_words=row, temperature=temperature, seed=i, min_tokens=i % 2) for i, row in enumerate(words)]
    histories = [([1, 2], [9, 5]), ([1], [5]), ([4], [2, 5]), ([1], [8, 5, 5]), ([3], [])]
    logits = torch.randn(len(words), VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, 7] += 5
    together = sample(logits, params, histories=histories).token_ids.tolist()
    alone = [int(sample(logits[i : i + 1], [params[i]], histories=[histories[i]]).token_ids) for i in range(len(words))]
    assert together == alone
    assert [token == 7 for token in together] == [False, True, False, False, True]


def test_a_row_whose_every_token_is_bad_shows_as_not_finite() -> None:
    words = [[token] for token in range(VOCAB)]
    best = sample(torch.zeros(1, VOCAB), [sampling(bad_words=words)], histories=[([1], [])]).best_logits
    assert not torch.isfinite(best).any()
