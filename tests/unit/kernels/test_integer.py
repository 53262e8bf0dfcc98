"""Integer products: exact sums of quantized numbers, and the same bits whatever the rows, threads and instructions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.base import Activation, Format, PackedWeight
from asyncllm.kernels.native import NativeKernels
from tests.support.gguf_blocks import gguf_rows, gguf_values

QUANTIZED = [stored_as for stored_as in Format if stored_as.is_quantized]
ROWS = [1, 2, 3, 5, 7, 8, 13, 32, 97, 128]
GROUP = 32
EPSILON = 2.0**-24
"""Half a unit in the last place of float32: the error of one rounding."""


def packed(kernels: NativeKernels, stored_as: Format, n: int = 200, k: int = 1280) -> tuple[PackedWeight, torch.Tensor]:
    """Return a weight for integer products, and its values."""
    rows = gguf_rows(n, k, stored_as)
    return kernels.pack_blocks(rows, stored_as, integer=True), gguf_values(rows, stored_as)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [M, k] rounded to 16 bits per row and group, in float64: what the definition says."""
    groups = x.view(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * torch.where(top > 0, 32767 / top, 0)).round()
    return ((top / 32767).double() * numbers.double()).view(x.shape)


@pytest.fixture
def fused(kernels: NativeKernels) -> Iterator[NativeKernels]:
    """The kernels with the instructions for pairs, which the test may switch off."""
    if not kernels.use_fused_dot(True):
        pytest.skip("this machine or this instruction set has no fused multiply-add of pairs")
    yield kernels
    kernels.use_fused_dot(True)


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_product_is_that_of_the_quantized_numbers(kernels: NativeKernels, stored_as: Format, rows: int) -> None:
    """Sums within a group are exact; each of a group's at most six roundings errs by half a unit of what is summed."""
    weight, values = packed(kernels, stored_as)
    x = torch.randn(rows, weight.k) * torch.logspace(-3, 3, weight.k)
    rounded = quantized(x)
    expected = rounded @ values.double().T
    bound = (rounded.abs() @ values.double().abs().T) * (6 * EPSILON) * (weight.k / 16)
    assert ((kernels.linear(x, weight).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
def test_activations_lose_little(kernels: NativeKernels, stored_as: Format) -> None:
    """Against float32 activations: half a step of each group, summed over the row's magnitudes."""
    weight, values = packed(kernels, stored_as)
    x = torch.randn(5, weight.k)
    expected = x.double() @ values.double().T
    steps = x.view(5, -1, GROUP).abs().amax(-1) / 32767
    magnitudes = values.view(weight.n, -1, GROUP).abs().sum(-1)
    bound = 0.51 * steps.double() @ magnitudes.double().T + 1e-4
    assert ((kernels.linear(x, weight).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
def test_a_row_does_not_depend_on_the_other_rows_or_threads(
    kernels: NativeKernels, alone: NativeKernels, stored_as: Format
) -> None:
    weight, _ = packed(kernels, stored_as)
    x = torch.randn(max(ROWS), weight.k)
    expected = kernels.linear(x, weight)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], weight), expected[:rows]), rows
        assert torch.equal(alone.linear(x[-rows:], weight), expected[-rows:]), rows


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_results_do_not_depend_on_the_instruction_set(stored_as: Format, rows: int) -> None:
    results = {isa: NativeKernels(1, isa) for isa in library.usable()}
    x = torch.randn(rows, 1280)
    outputs = [each.linear(x, packed(each, stored_as)[0]) for isa, each in results.items() if isa != "generic"]
    assert all(torch.equal(*pair) for pair in pairwise(outputs))


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
def test_results_do_not_depend_on_the_instructions_for_pairs(fused: NativeKernels, stored_as: Format) -> None:
    weight, _ = packed(fused, stored_as)
    for rows in (1, 2, 3, 4, 6, 8, 12, 40):
        x = torch.randn(rows, weight.k)
        expected = fused.linear(x, weight)
        assert not fused.use_fused_dot(False)
        assert torch.equal(fused.linear(x, weight), expected), rows
        assert fused.use_fused_dot(True)


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
def test_rows_come_back_as_an_embedding(kernels: NativeKernels, stored_as: Format) -> None:
    weight, values = packed(kernels, stored_as, 75, 256)
    ids = torch.tensor([0, 74, 31, 32, 74])
    assert torch.equal(kernels.gather_rows(weight, ids), values[ids])
    assert torch.equal(kernels.gather_rows(weight, ids, 2.5), 2.5 * values[ids])


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
def test_a_weight_can_be_packed_piece_by_piece(kernels: NativeKernels, stored_as: Format) -> None:
    rows = gguf_rows(75, 256, stored_as)
    whole = kernels.pack_blocks(rows, stored_as, integer=True)
    pieces = kernels.empty_weight(75, 256, stored_as, integer=True)
    for first, last in ((40, 75), (0, 13), (13, 40)):
        kernels.pack_rows(pieces, first, rows[first:last])
    assert torch.equal(pieces.data, whole.data)


@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_the_greatest_numbers_do_not_overflow(kernels: NativeKernels, largest: bool) -> None:
    """32767 * -128 * 32 fits into 32 bits; -128 is what a GGUF may hold, though nobody writes it."""
    rows = torch.zeros(33, 34 * 2, dtype=torch.uint8)
    rows.view(-1, 34)[:, 1] = 0x3C  # a scale of 1 in float16
    rows.view(-1, 34)[:, 2:] = 127 if largest else 128
    weight = kernels.pack_blocks(rows, Format.Q8_0, integer=True)
    sums = kernels.linear(torch.full((2, 64), 32767.0), weight)
    assert (sums == 64 * 32767.0 * (127 if largest else -128)).all()


@pytest.mark.parametrize("rows", [1, 9, 130])
@pytest.mark.parametrize("gate_as", [Format.Q4_1, None], ids=["integer", "mixed"])
def test_a_gated_product_is_made_of_its_two(kernels: NativeKernels, rows: int, gate_as: Format | None) -> None:
    up, _ = packed(kernels, Format.Q8_0, 300, 96)
    gate = packed(kernels, gate_as, 300, 96)[0] if gate_as else kernels.pack(torch.randn(300, 96))
    x = torch.randn(rows, 96)
    expected = kernels.activate(kernels.linear(x, gate), Activation.SILU, kernels.linear(x, up))
    assert torch.equal(kernels.gated_linear(x, gate, up, Activation.SILU), expected)
    alone = kernels.activate(kernels.linear(x, up), Activation.RELU)
    assert torch.equal(kernels.gated_linear(x, None, up, Activation.RELU), alone)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_greedy_tokens_are_the_argmax_of_the_logits(kernels: NativeKernels, rows: int) -> None:
    weight, _ = packed(kernels, Format.Q8_0, 1003, 96)
    x = torch.randn(rows, 96)
    best, _, logits = kernels.head(x, weight)
    assert torch.equal(logits, kernels.linear(x, weight))
    assert torch.equal(best, logits.argmax(-1))
    assert torch.equal(kernels.head(x, weight, with_logits=False).best, best)


def test_rows_may_be_strided_on_both_sides_and_get_a_bias(kernels: NativeKernels) -> None:
    weight, _ = packed(kernels, Format.Q8_0, 45, 64)
    x, out = torch.randn(9, 100), torch.full((9, 60), 7.0)
    without = kernels.linear(x[:, 20:84].contiguous(), weight)
    weight.bias = torch.randn(45)
    kernels.linear(x[:, 20:84], weight, out=out[:, 10:55])
    assert torch.equal(out[:, 10:55], without + weight.bias)
    assert (out[:, :10] == 7).all()
    assert (out[:, 55:] == 7).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_and_in_its_row(kernels: NativeKernels, wrong: float) -> None:
    weight, _ = packed(kernels, Format.Q8_0, 45, 64)
    x = torch.randn(3, 64)
    expected = kernels.linear(x, weight)
    x[1, 40] = wrong
    found = kernels.linear(x, weight)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_zeros_and_the_smallest_numbers_give_zero(kernels: NativeKernels) -> None:
    weight, _ = packed(kernels, Format.Q4_1, 45, 64)
    x = torch.zeros(2, 64)
    x[1] = 1e-40
    assert (kernels.linear(x, weight) == 0).all()


def test_nothing_is_done_for_no_rows(kernels: NativeKernels) -> None:
    """Also in a thread that has no memory for quantized rows yet."""
    weight, _ = packed(kernels, Format.Q8_0, 10, 32)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(kernels.linear, torch.empty(0, 32), weight).result().shape == (0, 10)
        assert thread.submit(kernels.head, torch.empty(0, 32), weight).result().best.shape == (0,)


def test_threads_that_call_at_once_do_not_share_their_quantized_rows(kernels: NativeKernels) -> None:
    weight, _ = packed(kernels, Format.Q8_0)
    inputs = [torch.randn(64, weight.k) for _ in range(8)]
    expected = [kernels.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: kernels.linear(x, weight), inputs * 4))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected * 4, strict=True))


def test_wrong_weights_are_refused(kernels: NativeKernels) -> None:
    with pytest.raises(ValueError, match="10 x 64 cannot be stored as BF16 for integer products"):
        kernels.empty_weight(10, 64, Format.BF16, integer=True)
    with pytest.raises(ValueError, match="10 x 288 cannot be stored as Q6_K for integer products"):
        kernels.empty_weight(10, 288, Format.Q6_K, integer=True)
