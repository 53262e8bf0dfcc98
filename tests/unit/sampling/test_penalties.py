"""Case 104: what penalties, bias and masks do to logits, checked on the logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncllm.sampling.penalties import Adjustments, TokenHistory
from asyncllm.wire.messages import EngineSampling
from tests.support.sampling import sample, sampling

VOCAB = 12
PROMPT, OUTPUT = [1, 2, 2, 5], [2, 7, 7, 7]


def adjust(logits: torch.Tensor, *params: EngineSampling, output: list[int] = OUTPUT) -> torch.Tensor:
    """Apply ``params`` to the rows of ``logits``, all with the same history; row i sits in slot i + 3."""
    tokens = torch.zeros(len(params) + 3, 20, dtype=torch.int64)
    tokens[3:, : len(PROMPT) + len(output)] = torch.tensor([*PROMPT, *output])
    rows = np.arange(len(params))
    history = TokenHistory(
        tokens, rows + 3, np.full(len(params), len(PROMPT)), np.full(len(params), len(PROMPT) + len(output))
    )
    changed = logits.clone()
    rows_to_params = {row: p for row, p in enumerate(params) if Adjustments.wanted(p)}
    Adjustments(rows_to_params, vocab_size=VOCAB, eos_token_ids=(2, 3), upload=torch.from_numpy).apply(changed, history)
    return changed


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.linspace(-2.0, 2.0, VOCAB).repeat(2, 1)


def test_case104_repetition_penalty_counts_prompt_and_output_once(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(), sampling(repetition_penalty=2.0))
    want = logits.clone()
    for token in {*PROMPT, *OUTPUT}:
        value = logits[1, token]
        want[1, token] = value / 2 if value > 0 else value * 2
    assert torch.equal(got, want)


def test_a_repetition_penalty_beyond_float32_leaves_no_nan(logits: torch.Tensor) -> None:
    logits[0, PROMPT[0]] = 0.0
    got = adjust(logits, sampling(repetition_penalty=1e300), sampling())
    assert not got.isnan().any()
    assert got[0, PROMPT[0]] == 0.0


@pytest.mark.parametrize("penalty", [1e-38, 1e-50, 5e-324])
def test_a_repetition_penalty_below_float32_excludes_nothing_and_brings_nothing_back(
    logits: torch.Tensor, penalty: float
) -> None:
    logits[0, PROMPT[0]] = 5.0
    got = adjust(logits, sampling(repetition_penalty=penalty, logit_bias={PROMPT[1]: -math.inf}), sampling())
    assert not got.isnan().any()
    assert got[0, PROMPT[1]] == -torch.inf
    assert got[0].max().isfinite()


def test_case104_frequency_penalty_counts_each_output_token(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(frequency_penalty=0.5), sampling())
    want = logits.clone()
    want[0, 2] -= 0.5
    want[0, 7] -= 1.5
    torch.testing.assert_close(got, want)


def test_case104_presence_penalty_counts_an_output_token_once(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(), sampling(presence_penalty=-0.75))
    want = logits.clone()
    want[1, [2, 7]] += 0.75
    torch.testing.assert_close(got, want)


def test_case104_no_output_yet_no_frequency_or_presence(logits: torch.Tensor) -> None:
    params = sampling(presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(adjust(logits, params, params, output=[]), logits)


def test_case104_logit_bias(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(logit_bias={0: 5.0, 11: -100.0}), sampling(logit_bias={3: 1.0}))
    want = logits.clone()
    want[0, 0] += 5
    want[0, 11] -= 100
    want[1, 3] += 1
    assert torch.equal(got, want)


def test_case104_allowed_ids_are_all_that_is_left(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(allowed_token_ids=[4, 6]), sampling())
    assert torch.equal(got[1], logits[1])
    assert got[0, [4, 6]].tolist() == logits[0, [4, 6]].tolist()
    assert torch.isneginf(got[0]).sum() == VOCAB - 2


def test_case58_no_end_token_before_min_tokens(logits: torch.Tensor) -> None:
    early, done = sampling(min_tokens=5, stop_token_ids=[9]), sampling(min_tokens=4, stop_token_ids=[9])
    got = adjust(logits, early, done)  # four tokens are out
    assert torch.isneginf(got[0]).nonzero().flatten().tolist() == [2, 3, 9]
    assert torch.equal(got[1], logits[1])


def test_case57_end_tokens_that_are_ignored_need_no_mask(logits: torch.Tensor) -> None:
    got = adjust(logits, sampling(min_tokens=9, stop_token_ids=[9], ignore_eos=True), sampling())
    assert torch.isneginf(got[0]).nonzero().flatten().tolist() == [9]


def test_all_at_once_in_order(logits: torch.Tensor) -> None:
    params = sampling(logit_bias={7: 3.0}, repetition_penalty=2.0, frequency_penalty=0.1, presence_penalty=0.2)
    got = adjust(logits, params, sampling())[0, 7]
    assert got.item() == pytest.approx((logits[0, 7].item() + 3.0) / 2 - 3 * 0.1 - 0.2, abs=1e-6)


def test_case103_allowed_token_ids_force_the_token() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 9.0
    params = [sampling(allowed_token_ids=[8]), sampling(temperature=1.0, allowed_token_ids=[9], seed=1)]
    assert sample(logits, params).token_ids.tolist() == [8, 9]


def test_a_row_with_no_token_left_shows_as_not_finite() -> None:
    logits = torch.zeros(2, VOCAB)
    params = [sampling(allowed_token_ids=[2], min_tokens=3), sampling()]
    best = sample(logits, params, histories=[([1], []), ([1], [])]).best_logits
    assert torch.isfinite(best).tolist() == [False, True]
