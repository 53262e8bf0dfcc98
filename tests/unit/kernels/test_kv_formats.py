"""Formats of keys and values: what storing costs, and attention within the bounds that follow from it.

With u the unit roundoff of float32: a score of D products carries a relative error of (D + 4) u of the sum of their
magnitudes, weights carry twice that (numerator and denominator), and sums over L tokens run in chunks of 256. An
element that is stored with an error e moves a score by at most the sum of |query| e, and the result by at most e.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from asyncllm.kernels.base import Format, KvShape
from asyncllm.kernels.native import NativeKernels
from tests.unit.kernels.test_attention import CASES, Case, Filled

UNIT = 2.0**-24
FORMAT_TO_ROUNDOFF = {Format.F32: 0.0, Format.BF16: 2.0**-9, Format.F16: 2.0**-11}
SCALE = 0.3  # of the scores, in Filled.attend


class Exact:
    """Attention of all tokens of one row in float64, [T, H * D], and the greatest error that a computation may have."""

    def __init__(
        self, case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stored: Format = Format.F32
    ) -> None:
        query, key, value = query.double(), key.double(), value.double()
        group = case.heads // case.kv_heads
        key_error, value_error = (stored_error(part, stored).repeat_interleave(group, 1) for part in (key, value))
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))  # [L, H, D]
        place = torch.arange(len(query))
        hidden = place[None, :] > place[:, None]
        if case.window is not None:
            hidden |= place[None, :] <= place[:, None] - case.window

        def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return torch.einsum("qhd,khd->hqk", query * SCALE, key)

        weights = scores(query, key).masked_fill(hidden, -torch.inf).softmax(-1)
        self.result = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        rounding = (case.head_dim + 4) * UNIT * scores(query.abs(), key.abs() + key_error)
        moved = (rounding + scores(query.abs(), key_error)).masked_fill(hidden, 0.0).amax(-1)  # [H, Q]
        summing = (256 + len(query) / 64 + 16) * UNIT
        relative = (torch.expm1(2 * moved) + summing).T[:, :, None]  # [Q, H, 1]
        self.bound = (relative * (value.abs() + value_error).amax(0) + value_error.amax(0)).flatten(1)


def stored_error(x: torch.Tensor, stored: Format) -> torch.Tensor:
    """Return how far each stored element may be from ``x`` [L, KV, D]."""
    if stored is Format.I8:
        return (x.abs().amax(-1, keepdim=True) / 127 * (0.5 + 1e-4)).expand_as(x)
    return x.abs() * FORMAT_TO_ROUNDOFF[stored] + (2.0**-25 if stored is Format.F16 else 0.0)


def rows_of(filled: Filled) -> list[slice]:
    start = filled.batch.query_start.tolist()
    return [slice(first, last) for first, last in itertools.pairwise(start)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_right_within_the_bound_of_its_format(kernels: NativeKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    found = filled.attend(filled.batch, filled.query).double()
    slots = torch.from_numpy(filled.batch.slot_mapping)
    stored_key, stored_value = kernels.read_kv(case.shape, filled.cache, slots)
    for row in rows_of(filled)[1:]:  # 300 and 17 tokens
        query = filled.query[row]
        for exact in (
            Exact(case, query, stored_key[row], stored_value[row]),
            Exact(case, query, filled.key[row], filled.value[row], case.format),
        ):
            assert ((found[row] - exact.result).abs() <= exact.bound).all()


def test_int8_keeps_every_element_within_half_a_step(kernels: NativeKernels) -> None:
    filled = Filled(kernels, Case(4, 2, 20, 24, Format.I8))
    slots = torch.from_numpy(filled.batch.slot_mapping)
    for found, wanted in zip(
        kernels.read_kv(filled.case.shape, filled.cache, slots), (filled.key, filled.value), strict=True
    ):
        assert ((found - wanted).abs() <= stored_error(wanted, Format.I8)).all()
        assert torch.equal(found.abs().amax(-1), wanted.abs().amax(-1)) or torch.allclose(
            found.abs().amax(-1), wanted.abs().amax(-1), rtol=1e-6, atol=0.0
        )


def test_int8_holds_zeros_and_says_what_is_not_finite(kernels: NativeKernels) -> None:
    filled = Filled(kernels, Case(2, 1, 16, 16, Format.I8))
    key = torch.zeros_like(filled.key)
    key[5, 0, 3], key[6, 0, 3] = float("nan"), float("inf")
    kernels.rotate_and_write(filled.case.shape, filled.cache, filled.batch, None, key, key)
    found, _ = kernels.read_kv(filled.case.shape, filled.cache, torch.from_numpy(filled.batch.slot_mapping))
    broken = torch.tensor([5, 6])
    assert not found[broken].isfinite().any()
    kept = torch.ones(len(found), dtype=torch.bool)
    kept[broken] = False
    assert (found[kept] == 0).all()


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[12]], ids=str)
def test_a_zeroed_block_gives_finite_numbers(kernels: NativeKernels, case: Case) -> None:
    filled = Filled(kernels, case)
    broken = torch.full_like(filled.key, float("nan"))
    kernels.rotate_and_write(case.shape, filled.cache, filled.batch, None, broken, broken)
    assert not filled.attend(filled.batch, filled.query).isfinite().any()
    filled.cache.zero_()
    assert (filled.attend(filled.batch, filled.query) == 0).all()


@pytest.mark.parametrize(
    ("stored_as", "block_size", "num_bytes"),
    [
        (Format.F32, 16, 2 * 16 * 64 * 4),
        (Format.BF16, 16, 2 * 16 * 64 * 2),
        (Format.F16, 8, 2 * 16 * 64 * 2),  # a block takes whole groups of 16
        (Format.I8, 16, 2 * 16 * (64 + 4)),
        (Format.I8, 40, 2 * 48 * (64 + 4)),
    ],
    ids=str,
)
def test_a_block_takes_what_its_format_says(
    kernels: NativeKernels, stored_as: Format, block_size: int, num_bytes: int
) -> None:
    shape = KvShape(num_kv_heads=3, head_dim=64, block_size=block_size, format=stored_as)
    assert kernels.kv_block_bytes(shape) == 3 * num_bytes


def test_other_formats_are_refused(kernels: NativeKernels) -> None:
    shape = KvShape(num_kv_heads=1, head_dim=8, block_size=16, format=Format.Q8_0)
    assert "Q8_0" in (kernels.why_not_kv(shape) or "")
    with pytest.raises(ValueError, match="Q8_0"):
        kernels.allocate_kv(shape, 4)
