"""100,000 draws follow the distribution that the parameters ask for, in every compiled library that runs here."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.kernels.native import NativeKernels
from tests.support.distributions import ALARM, COMBINATIONS, chance, draw, logits_row, reference
from tests.support.sampling import sampling


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
def test_draws_follow_the_distribution(kernels: NativeKernels, fields: dict[str, Any]) -> None:
    params = sampling(seed=4321, **fields)
    assert chance(draw(logits_row(), params, kernels), reference(logits_row(), params)) > ALARM
