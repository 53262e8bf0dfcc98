"""Every pair of options, drawn by the compiled kernels, against a slow sampler in numpy."""

from __future__ import annotations

from asyncllm.kernels.native import NativeKernels
from tests.support.option_pairs import check_rows, make_rows


def test_every_pair_of_options_agrees_with_the_reference(kernels: NativeKernels) -> None:
    rows = make_rows()
    check_rows(rows, kernels)
    for row in rows[::7]:
        check_rows([row], kernels)
