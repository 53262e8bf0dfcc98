"""Drawing tokens: what the sampler does in torch, which its own tests hold to the distributions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.native import NativeKernels
from tests.support.sampling import sample, sampling

FIELDS: list[dict[str, Any]] = [
    {},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 2},
    {"top_k": 40},
    {"top_k": 40, "min_p": 0.02},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-6},
    {"top_p": 0.9999},
    {"top_p": 0.95, "min_p": 0.03},
    {"top_k": 300, "top_p": 0.7},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
]
TEMPERATURES = (1.0, 0.05, 0.7, 3.0, 100.0)
ROWS_EACH = 12


def logits_of(vocab_size: int, num_rows: int, spread: float) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (50, 2.0), (1000, 0.01), (1037, 4.0), (5003, 12.0)])
def test_the_tokens_are_those_of_torch(kernels: NativeKernels, vocab_size: int, spread: float) -> None:
    """All kinds of rows in one batch; the margin is for numbers that fall on a border within rounding."""
    kinds = list(itertools.product(FIELDS, TEMPERATURES)) * ROWS_EACH
    params = [sampling(temperature=t, seed=i, sample_index=i % 3, **fields) for i, (fields, t) in enumerate(kinds)]
    logits = logits_of(vocab_size, len(params), spread)
    positions = [i * 7919 for i in range(len(params))]
    expected = sample(logits, params, positions=positions)
    got = sample(logits, params, positions=positions, kernels=kernels)
    assert torch.equal(got.best_logits, expected.best_logits)
    assert int((got.token_ids != expected.token_ids).sum()) <= 1


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("min_p", [1.0, 0.5, 0.05])
def test_min_p_drops_what_another_filter_kept_last(
    kernels: NativeKernels, fields: dict[str, Any], min_p: float
) -> None:
    """The second token of each row is little to far below min_p, and the last one that the other filter keeps."""
    distances = torch.arange(1, 501) / 500 * 0.3 - math.log(min_p)
    logits = torch.full((500, 20), -torch.inf)
    logits[:, 17], logits[:, 3] = 0.0, -distances
    params = [sampling(temperature=1.0, seed=i, min_p=min_p, **fields) for i in range(500)]
    assert set(sample(logits, params, kernels=kernels).token_ids.tolist()) == {17}


@pytest.mark.parametrize("fields", [{"top_k": 4}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.7}], ids=str)
def test_equal_logits_are_ordered_by_id(kernels: NativeKernels, fields: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, -1.0, 0.5, 0.5, 1.0, 0.0]).expand(500, -1)
    params = [sampling(temperature=1.0, seed=i, **fields) for i in range(500)]
    got = sample(logits, params, kernels=kernels).token_ids
    assert torch.equal(got, sample(logits, params).token_ids)
    assert set(got.tolist()) <= {1, 3, 4, 8, 2, 6}


def test_greedy_takes_the_largest_and_the_first_of_equals(kernels: NativeKernels) -> None:
    logits = torch.zeros(3, 1030)
    logits[0, 1029] = logits[1, 517] = logits[1, 1020] = 1.0
    assert sample(logits, [sampling()] * 3, kernels=kernels).token_ids.tolist() == [1029, 517, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_greatest_logit_is_told(kernels: NativeKernels, temperature: float) -> None:
    logits = torch.randn(4, 100)
    logits[0, 30] = logits[0, 77] = torch.nan
    logits[1, 99] = torch.inf
    logits[2] = -torch.inf
    got = sample(logits, [sampling(temperature=temperature)] * 4, kernels=kernels)
    assert torch.isfinite(got.best_logits).tolist() == [False, False, False, True]
    assert got.token_ids[:3].tolist() == [30, 99, 0]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.3}], ids=str)
def test_a_token_of_probability_zero_is_never_drawn(kernels: NativeKernels, fields: dict[str, Any]) -> None:
    logits = torch.full((300, 70), -torch.inf)
    logits[:, 3], logits[:, 69] = 0.0, 1.0
    params = [sampling(temperature=1.0, seed=i, **fields) for i in range(300)]
    assert set(sample(logits, params, kernels=kernels).token_ids.tolist()) == {3, 69}


def test_a_token_does_not_depend_on_its_neighbours_or_the_instruction_set(
    kernels: NativeKernels, alone: NativeKernels
) -> None:
    logits = logits_of(3001, 40, 3.0)
    params = [sampling(temperature=0.8, seed=i, **FIELDS[i % len(FIELDS)]) for i in range(40)]
    together = sample(logits, params, kernels=kernels).token_ids
    single = [sample(logits[i : i + 1], params[i : i + 1], kernels=alone).token_ids for i in range(40)]
    assert torch.equal(torch.cat(single), together)
    plainest = NativeKernels(1, library.usable()[0])
    assert torch.equal(sample(logits, params, kernels=plainest).token_ids, together)


def test_parameters_that_do_not_fit_are_refused(kernels: NativeKernels) -> None:
    columns_of_two = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="2 rows"):
        kernels.draw_tokens(columns_of_two, torch.zeros(2).numpy(), torch.zeros(2).long().numpy())
