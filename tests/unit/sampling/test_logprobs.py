from __future__ import annotations

import pytest
import torch

from asyncllm.sampling.logprobs import compute_logprobs
from tests.support.sampling import sample, sampling

VOCAB = 100


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))


def test_chosen_first_then_the_most_likely_in_order(logits: torch.Tensor) -> None:
    [row] = compute_logprobs(logits[:1], torch.tensor([7]), with_top=True).to_rows([4])
    want = torch.log_softmax(logits[0].double(), 0)
    order = want.argsort(descending=True)
    assert row.width == 5
    assert row.token_ids == [7, *order[:4].tolist()]
    assert row.logprobs == pytest.approx(want[row.token_ids].tolist(), abs=1e-5)
    assert row.ranks == [int((want > want[7]).sum()) + 1, 1, 2, 3, 4]


def test_rows_have_as_many_top_tokens_as_each_asked_for(logits: torch.Tensor) -> None:
    rows = compute_logprobs(logits, torch.tensor([1, 2, 3]), with_top=True).to_rows([0, 64, 3])
    assert [row.width for row in rows] == [1, 65, 4]
    assert [len(row.token_ids) == len(row.logprobs) == len(row.ranks) == row.width for row in rows] == [True] * 3


def test_rows_of_one_request_become_consecutive_positions(logits: torch.Tensor) -> None:
    tensors = compute_logprobs(logits, torch.tensor([1, 2, 3]), with_top=True)
    block = tensors.to_block(2)
    rows = tensors.to_rows([2, 2, 2])
    assert block.width == 3
    assert block.token_ids == [token for row in rows for token in row.token_ids]
    assert block.logprobs == [value for row in rows for value in row.logprobs]
    assert block.ranks == [rank for row in rows for rank in row.ranks]


def test_sampler_reports_the_logits_before_adjustments_and_temperature(logits: torch.Tensor) -> None:
    params = [
        sampling(),
        sampling(logprobs=2, logit_bias={11: 100.0}),
        sampling(logprobs=0, temperature=0.5, seed=1),
    ]
    out = sample(logits, params)
    assert out.logprobs is not None
    want = torch.log_softmax(logits.double(), 1)
    forced, drawn = out.logprobs.to_rows([2, 0])
    assert forced.token_ids[0] == 11
    assert forced.logprobs == pytest.approx(want[1, forced.token_ids].tolist(), abs=1e-5)
    assert drawn.token_ids == [int(out.token_ids[2])]
    assert drawn.logprobs == pytest.approx(want[2, drawn.token_ids].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked(logits: torch.Tensor) -> None:
    assert sample(logits, [sampling()] * 3).logprobs is None


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_requested_tokens_follow_with_their_ranks(logits: torch.Tensor, num_logprobs: int) -> None:
    """In their own order, those chosen or most likely included; beside rows that name fewer or none."""
    best, least = int(logits[1].argmax()), int(logits[1].argmin())
    wanted = [least, 7, best]
    params = [
        sampling(logprobs=1),
        sampling(logprobs=num_logprobs, logprob_token_ids=wanted, logit_bias={11: 100.0}),
        sampling(logprobs=3, logprob_token_ids=[99]),
    ]
    out = sample(logits, params)
    assert out.logprobs is not None
    first, row, last = out.logprobs.to_rows([1, num_logprobs, 3])
    want = torch.log_softmax(logits.double(), 1)
    assert (first.width, len(first.token_ids), last.width, last.token_ids[-1]) == (2, 2, 5, 99)
    assert row.width == len(row.token_ids) == len(row.logprobs) == len(row.ranks) == 4 + num_logprobs
    assert (row.token_ids[0], row.token_ids[-3:]) == (11, wanted)
    assert row.logprobs == pytest.approx(want[1, row.token_ids].tolist(), abs=1e-5)
    assert row.ranks[-3:] == [VOCAB, int((want[1] > want[1, 7]).sum()) + 1, 1]


def test_equal_logits_have_equal_ranks() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 3.0, 2.0]])
    out = sample(logits, [sampling(logprobs=0, logprob_token_ids=[5, 3, 1, 4, 0])])
    assert out.logprobs is not None
    [row] = out.logprobs.to_rows([0])
    assert row.ranks == [1, 2, 5, 2, 1, 6]


def test_a_rows_requested_logprobs_do_not_depend_on_its_neighbours(logits: torch.Tensor) -> None:
    params = [sampling(logprobs=i, logprob_token_ids=list(range(i, 40, 7))[: 2 + i]) for i in range(3)]
    out = sample(logits, params).logprobs
    assert out is not None
    together = out.to_rows([0, 1, 2])
    for i in range(3):
        alone = sample(logits[i : i + 1], [params[i]]).logprobs
        assert alone is not None
        assert alone.to_rows([i]) == [together[i]]
