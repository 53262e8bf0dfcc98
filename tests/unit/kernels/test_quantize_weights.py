"""Plain weights quantized while they are packed: the blocks of ``gguf``, and errors within their bounds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.base import Format
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels

Q8_0, Q4_1 = Format.Q8_0, Format.Q4_1


def all_rows(kernels: NativeKernels, values: torch.Tensor, stored_as: Format, *, integer: bool = True) -> torch.Tensor:
    weight = kernels.pack(values, stored_as, integer=integer)
    return kernels.gather_rows(weight, torch.arange(len(values)))


def heavy_tailed(n: int = 60, k: int = 256) -> torch.Tensor:
    return torch.randn(n, k) * torch.rand(n, k).exp() * torch.logspace(-4, 1, n)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integer", [True, False])
def test_eight_bits_are_the_blocks_that_gguf_makes(kernels: NativeKernels, dtype: torch.dtype, integer: bool) -> None:
    values = heavy_tailed().to(dtype)
    values[3, 32:64] = 0
    blocks = torch.from_numpy(gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0))
    ours = kernels.pack(values, Q8_0, integer=integer)
    assert torch.equal(ours.data, kernels.pack_blocks(blocks, Q8_0, integer=integer).data)


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def test_four_bits_err_less_than_the_extremes_of_a_block_make_them(kernels: NativeKernels) -> None:
    """``gguf`` takes scale and minimum from the extremes; the least squares are at least a twentieth better."""
    values = torch.randn(60, 256)
    blocks = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.Q4_1)
    plain = rms(torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)) - values)
    found = rms(all_rows(kernels, values, Q4_1) - values)
    assert found < 0.95 * plain
    assert found < 0.08  # of a standard deviation of 1


def test_no_block_of_four_bits_is_worse_than_with_its_extremes(kernels: NativeKernels) -> None:
    values = heavy_tailed()
    blocks = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.Q4_1)
    plain = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1))
    errors = [
        (each - values).double().square().view(60, -1, 32).sum(-1) for each in (plain, all_rows(kernels, values, Q4_1))
    ]
    assert (errors[1] <= errors[0] * 1.001 + 1e-12).all()


def test_sixteen_levels_are_kept_exactly(kernels: NativeKernels) -> None:
    values = (torch.arange(64) % 16).float().repeat(5, 1) * 0.5 - 3.0
    assert torch.equal(all_rows(kernels, values, Q4_1), values)


@pytest.mark.parametrize("constant", [0.0, 1.5, -2.0])
def test_equal_numbers_are_kept_exactly(kernels: NativeKernels, constant: float) -> None:
    values = torch.full((5, 64), constant)
    assert torch.equal(all_rows(kernels, values, Q4_1), values)


@pytest.mark.parametrize("stored_as", [Q8_0, Q4_1], ids=lambda f: f.name)
@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_rows_may_end_within_a_block(kernels: NativeKernels, stored_as: Format, k: int) -> None:
    values, x = torch.randn(40, k), torch.randn(7, k)
    filled = torch.zeros(40, -(-k // 32) * 32)
    filled[:, :k] = values
    x_filled = torch.zeros(7, filled.shape[1])
    x_filled[:, :k] = x
    ours, whole = kernels.pack(values, stored_as, integer=True), kernels.pack(filled, stored_as, integer=True)
    assert torch.equal(kernels.linear(x, ours), kernels.linear(x_filled, whole))
    assert torch.equal(all_rows(kernels, values, stored_as), all_rows(kernels, filled, stored_as)[:, :k])


@pytest.mark.parametrize("stored_as", [Q8_0, Q4_1], ids=lambda f: f.name)
def test_every_instruction_set_chooses_the_same_numbers(stored_as: Format) -> None:
    values = heavy_tailed()
    found = [all_rows(NativeKernels(1, isa), values, stored_as) for isa in library.usable()]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("stored_as", [Q8_0, Q4_1], ids=lambda f: f.name)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_not_made_to_look_so(
    kernels: NativeKernels, stored_as: Format, wrong: float
) -> None:
    values = torch.randn(40, 64)
    values[7, 40] = wrong
    found = kernels.linear(torch.randn(2, 64), kernels.pack(values, stored_as, integer=True))
    assert not found[:, 7].isfinite().any()
    assert found[:, [*range(7), *range(8, 40)]].isfinite().all()


def test_only_two_formats_are_made_of_plain_numbers(kernels: NativeKernels, reference: TorchKernels) -> None:
    with pytest.raises(ValueError, match="Q4_0 wants"):
        kernels.pack(torch.randn(4, 64), Format.Q4_0)
    with pytest.raises(ValueError, match="blocks"):
        reference.pack(torch.randn(4, 64), Q8_0)
    with pytest.raises(ValueError, match="no integer products"):
        reference.empty_weight(4, 64, Q8_0, integer=True)
    assert np.all([stored_as.takes_plain for stored_as in (Format.F32, Format.BF16, Format.F16, Q8_0, Q4_1)])
