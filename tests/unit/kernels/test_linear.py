"""Packed weights and matrix products: right, and the same bit for bit whatever the rows, threads and vector width."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.base import Activation, Format, PackedWeight, lossless_format
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels, dequantize_blocks
from tests.support.gguf_blocks import gguf_rows as blocks
from tests.support.gguf_blocks import gguf_values

PLAIN = [Format.F32, Format.BF16, Format.F16]
QUANTIZED = [stored_as for stored_as in Format if stored_as.is_quantized]
SHAPES = [(1, 1), (7, 100), (33, 64), (576, 576), (100, 1700)]
ROWS = [*range(1, 27), 31, 64, 96, 97, 127, 128]


def plain(kernels: NativeKernels, n: int, k: int, stored_as: Format) -> tuple[torch.Tensor, PackedWeight]:
    values = torch.randn(n, k).to(stored_as.dtype)
    return values, kernels.pack(values, stored_as)


@pytest.mark.parametrize("stored_as", PLAIN, ids=lambda f: f.name)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_product_equals_torch_in_double(kernels: NativeKernels, stored_as: Format, n: int, k: int) -> None:
    values, weight = plain(kernels, n, k, stored_as)
    x = torch.randn(37, k)
    expected = (x.double() @ values.double().T).float()
    torch.testing.assert_close(kernels.linear(x, weight), expected, rtol=1e-5, atol=2e-6 * k)


@pytest.mark.parametrize("stored_as", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 3, 12, 40, 128])
def test_gguf_blocks_give_the_bits_of_their_dequantized_values(
    kernels: NativeKernels, stored_as: Format, rows: int
) -> None:
    k = 1280 if stored_as.block_values == 256 else 1088
    raw = blocks(100, k, stored_as)
    values = gguf_values(raw, stored_as)
    x = torch.randn(rows, k)
    as_stored, dequantized = kernels.pack_blocks(raw, stored_as), kernels.pack(values, Format.F32)
    assert torch.equal(kernels.linear(x, as_stored), kernels.linear(x, dequantized))
    assert torch.equal(dequantize_blocks(raw, stored_as), values)


@pytest.mark.parametrize("stored_as", [*PLAIN, *QUANTIZED], ids=lambda f: f.name)
def test_a_row_does_not_depend_on_the_other_rows_or_threads(
    kernels: NativeKernels, alone: NativeKernels, stored_as: Format
) -> None:
    n, k = 200, 1280 if stored_as.is_quantized else 1056
    if stored_as.is_quantized:
        weight = kernels.pack_blocks(blocks(n, k, stored_as), stored_as)
    else:
        weight = plain(kernels, n, k, stored_as)[1]
    x = torch.randn(max(ROWS), k)
    expected = kernels.linear(x, weight)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], weight), expected[:rows]), rows
        assert torch.equal(alone.linear(x[-rows:], weight), expected[-rows:]), rows


def test_results_do_not_depend_on_the_vector_width() -> None:
    wide = [isa for isa in library.usable() if isa.startswith("x86-64")]
    if len(wide) < 2:
        pytest.skip("one instruction set with fused multiply-add only")
    values, x = torch.randn(100, 600), torch.randn(5, 600)
    results = [NativeKernels(1, isa) for isa in wide]
    first, second = (each.linear(x, each.pack(values, Format.BF16)) for each in results)
    assert torch.equal(first, second)


def test_bias_is_added_after_the_sum(kernels: NativeKernels) -> None:
    values, bias, x = torch.randn(45, 64), torch.randn(45), torch.randn(9, 64)
    without = kernels.linear(x, kernels.pack(values))
    assert torch.equal(kernels.linear(x, kernels.pack(values, bias=bias)), without + bias)


def test_rows_may_be_strided_on_both_sides(kernels: NativeKernels) -> None:
    weight, x, out = kernels.pack(torch.randn(45, 64)), torch.randn(9, 100), torch.full((9, 60), 7.0)
    kernels.linear(x[:, 20:84], weight, out=out[:, 10:55])
    assert torch.equal(out[:, 10:55], kernels.linear(x[:, 20:84].contiguous(), weight))
    assert (out[:, :10] == 7).all()
    assert (out[:, 55:] == 7).all()


@pytest.mark.parametrize("stored_as", [Format.BF16, *QUANTIZED], ids=lambda f: f.name)
def test_a_weight_can_be_packed_piece_by_piece(kernels: NativeKernels, stored_as: Format) -> None:
    rows = blocks(75, 256, stored_as) if stored_as.is_quantized else torch.randn(75, 256)
    whole = kernels.pack_blocks(rows, stored_as) if stored_as.is_quantized else kernels.pack(rows, stored_as)
    pieces = kernels.empty_weight(75, 256, stored_as)
    for first, last in ((40, 75), (0, 13), (13, 40)):
        kernels.pack_rows(pieces, first, rows[first:last])
    assert torch.equal(pieces.data, whole.data)


@pytest.mark.parametrize("stored_as", [*PLAIN, *QUANTIZED], ids=lambda f: f.name)
def test_rows_come_back_as_an_embedding(kernels: NativeKernels, stored_as: Format) -> None:
    if stored_as.is_quantized:
        raw = blocks(75, 256, stored_as)
        weight, values = kernels.pack_blocks(raw, stored_as), dequantize_blocks(raw, stored_as)
    else:
        values, weight = plain(kernels, 75, 64, stored_as)
    ids = torch.tensor([0, 74, 31, 32, 74])
    assert torch.equal(kernels.gather_rows(weight, ids), values[ids].float())
    assert torch.equal(kernels.gather_rows(weight, ids, 2.5), 2.5 * values[ids].float())


@pytest.mark.parametrize("wrong", [-1, 75])
def test_an_id_out_of_range_is_refused(kernels: NativeKernels, wrong: int) -> None:
    weight = kernels.pack(torch.randn(75, 64))
    with pytest.raises(ValueError, match="75 rows"):
        kernels.gather_rows(weight, torch.tensor([0, wrong]))


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
@pytest.mark.parametrize("rows", [1, 9, 130])
def test_a_gated_product_equals_torch(
    kernels: NativeKernels, reference: TorchKernels, activation: Activation, rows: int
) -> None:
    gate, up = (torch.randn(300, 64) for _ in range(2))
    bias, x = torch.randn(300), torch.randn(rows, 64)
    for gated in (True, False):
        results = [
            each.gated_linear(x, each.pack(gate) if gated else None, each.pack(up, bias=bias), activation)
            for each in (kernels, reference)
        ]
        torch.testing.assert_close(*results, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("rows", [1, 5, 130])
def test_greedy_tokens_are_the_argmax_of_the_logits(kernels: NativeKernels, rows: int) -> None:
    weight, x = kernels.pack(torch.randn(1003, 64)), torch.randn(rows, 64)
    best, best_logits, logits = kernels.head(x, weight)
    assert torch.equal(logits, kernels.linear(x, weight))
    assert torch.equal(best, logits.argmax(-1))
    assert torch.equal(best_logits, logits.amax(-1))
    alone = kernels.head(x, weight, with_logits=False)
    assert torch.equal(alone.best, best)
    assert torch.equal(alone.best_logits, best_logits)


def test_the_rows_of_a_head_can_end_earlier(kernels: NativeKernels) -> None:
    weight, x = kernels.pack(torch.randn(1003, 64)), torch.randn(5, 64)
    shorter = replace(weight, n=70)
    assert torch.equal(kernels.head(x, shorter).best, kernels.linear(x, weight)[:, :70].argmax(-1))


def test_of_equal_logits_the_first_wins(kernels: NativeKernels) -> None:
    values = torch.zeros(1003, 8)
    values[[40, 41, 700, 1002]] = 1.0
    assert kernels.head(torch.ones(3, 8), kernels.pack(values)).best.tolist() == [40, 40, 40]


def test_nan_logits_are_the_greatest_as_in_torch(kernels: NativeKernels) -> None:
    values = torch.randn(1003, 8)
    values[[500, 900]] = float("nan")
    values[3] = float("inf")
    best, best_logits, logits = kernels.head(torch.ones(2, 8), kernels.pack(values, Format.F32))
    assert logits is not None
    assert best.tolist() == logits.argmax(-1).tolist() == [500, 500]
    assert best_logits.isnan().all()


def test_logits_of_minus_infinity_still_have_an_argmax(kernels: NativeKernels) -> None:
    values = torch.full((70, 1), float("-inf"))
    assert kernels.head(torch.ones(1, 1), kernels.pack(values, Format.F32)).best.tolist() == [0]


def test_nothing_is_done_for_no_rows(kernels: NativeKernels) -> None:
    weight = kernels.pack(torch.randn(10, 8))
    assert kernels.linear(torch.empty(0, 8), weight).shape == (0, 10)
    assert kernels.head(torch.empty(0, 8), weight).best.shape == (0,)


def test_the_smallest_lossless_format_is_found() -> None:
    values = torch.randn(10, 8)
    assert lossless_format(values) is Format.F32
    assert lossless_format(values.bfloat16().float()) is Format.BF16
    assert lossless_format(values.half().float()) is Format.F16
    assert lossless_format(values.half()) is Format.F16


def test_wrong_shapes_are_refused_by_name(kernels: NativeKernels) -> None:
    weight = kernels.pack(torch.randn(10, 8))
    with pytest.raises(ValueError, match="rows have 9 elements, not 8"):
        kernels.linear(torch.randn(2, 9), weight)
    with pytest.raises(ValueError, match="activations are float32"):
        kernels.linear(torch.randn(2, 8, dtype=torch.float64), weight)
    with pytest.raises(ValueError, match="10 x 33 cannot be stored as Q8_0"):
        kernels.empty_weight(10, 33, Format.Q8_0)
    with pytest.raises(ValueError, match="10 x 288 cannot be stored as Q6_K"):
        kernels.empty_weight(10, 288, Format.Q6_K)
    with pytest.raises(ValueError, match="rows 9 … 11 of 10"):
        kernels.pack_rows(weight, 9, torch.randn(2, 8))
