"""The compiled kernels for tests that run a model on them."""

from __future__ import annotations

from functools import cache

import pytest

from asyncllm.kernels.base import Kernels
from asyncllm.kernels.selector import make_kernels

__all__ = ["native_kernels"]


@cache
def _make() -> Kernels:
    return make_kernels(2)


def native_kernels() -> Kernels:
    """Return the compiled kernels on two threads; skip the test where there are none."""
    kernels = _make()
    if kernels.name != "native":
        pytest.skip(kernels.description)
    return kernels
