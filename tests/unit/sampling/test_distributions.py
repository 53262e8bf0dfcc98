"""100,000 draws follow the distribution that the parameters ask for, in torch; chi-square, see the support module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncllm.sampling.rng import uniforms
from tests.support.distributions import ALARM, COMBINATIONS, chance, draw, logits_row, reference
from tests.support.sampling import sampling


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    params = sampling(seed=1234, **fields)
    assert chance(draw(logits_row(), params), reference(logits_row(), params)) > ALARM


@pytest.mark.parametrize("wrong", [{"temperature": 1.03}, {"top_p": 0.98}, {"top_k": 15}, {"min_p": 0.1}], ids=str)
def test_a_sampler_that_is_a_little_wrong_would_be_found(wrong: dict[str, Any]) -> None:
    asked = sampling(seed=1234, temperature=1.0)
    shares = reference(logits_row(), sampling(**{"temperature": 1.0, **wrong}))
    assert chance(draw(logits_row(), asked), shares) < ALARM


AXES = {
    "seeds": lambda n: (n, n * 0, n * 0),
    "seeds beyond 32 bits": lambda n: (n << np.uint64(32), n * 0, n * 0),
    "samples": lambda n: (n * 0 + 7, n, n * 0),
    "positions": lambda n: (n * 0 + 7, n * 0, n),
    "a seed per position": lambda n: (n, n * 0, n),
}


@pytest.mark.parametrize("axis", AXES)
def test_numbers_are_uniform_and_neighbours_independent_along_each_key(axis: str) -> None:
    numbers = uniforms(*AXES[axis](np.arange(100_001, dtype=np.uint64)))
    cells = (numbers * 10).astype(np.int64)
    assert chance((numbers * 100).astype(np.int64), np.full(100, 0.01)) > ALARM
    for distance in (1, 2, 4):
        pairs = cells[:-distance] * 10 + cells[distance:]
        assert chance(pairs, np.full(100, 0.01)) > ALARM
