"""Norms, activations and rotary positions against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm.kernels.base import Activation, KvShape, Norm, NormKind, Rotary
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels
from tests.unit.kernels.batches import make_batch

SIZES = [1, 5, 16, 40, 576, 1000]


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm_equals_torch(kernels: NativeKernels, n: int) -> None:
    x, weight = torch.randn(23, n), torch.rand(n)
    found = kernels.add_norm(x, Norm(kind=NormKind.RMS, weight=weight, eps=1e-5))
    torch.testing.assert_close(found, F.rms_norm(x, (n,), weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", SIZES)
def test_layer_norm_equals_torch(kernels: NativeKernels, n: int) -> None:
    x, weight, bias = torch.randn(23, n) + 3, torch.rand(n), torch.randn(n)
    found = kernels.add_norm(x, Norm(kind=NormKind.LAYER, weight=weight, bias=bias, eps=1e-5))
    torch.testing.assert_close(found, F.layer_norm(x, (n,), weight, bias, 1e-5), rtol=1e-4, atol=1e-5)
    bare = kernels.add_norm(x, Norm(kind=NormKind.LAYER, eps=1e-5))
    torch.testing.assert_close(bare, F.layer_norm(x, (n,), eps=1e-5), rtol=1e-4, atol=1e-5)


def test_the_residual_is_added_in_place(kernels: NativeKernels) -> None:
    x, residual = torch.randn(9, 100), torch.randn(9, 120)[:, :100]
    expected = x + residual
    norm = Norm(kind=NormKind.RMS, eps=1e-5)
    found = kernels.add_norm(x, norm, residual)
    assert torch.equal(x, expected)
    assert torch.equal(found, kernels.add_norm(expected, norm))


def test_a_normed_row_depends_on_itself_alone(kernels: NativeKernels, alone: NativeKernels) -> None:
    x = torch.randn(50, 577)
    norm = Norm(kind=NormKind.RMS, eps=1e-5)
    whole = kernels.add_norm(x, norm)
    for row in range(50):
        assert torch.equal(alone.add_norm(x[row : row + 1], norm), whole[row : row + 1])


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
def test_activations_equal_torch(kernels: NativeKernels, reference: TorchKernels, activation: Activation) -> None:
    x, up = torch.randn(7, 1003) * 8, torch.randn(7, 1003)
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    for other in (None, up):
        found, expected = (each.activate(x, activation, other) for each in (kernels, reference))
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=3e-6)  # gelu cancels at the negative end


def test_nan_goes_through_activations(kernels: NativeKernels) -> None:
    x = torch.full((1, 40), float("nan"))
    for activation in Activation:
        assert kernels.activate(x, activation).isnan().all(), activation.name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [48, 16])
def test_rotation_and_head_norms_equal_torch(
    kernels: NativeKernels, reference: TorchKernels, interleaved: bool, dim: int
) -> None:
    shape = KvShape(num_kv_heads=2, head_dim=48, block_size=16)
    batch, num_blocks = make_batch([(40, 90), (1, 33)], 16)
    angles = torch.outer(torch.arange(100.0), torch.rand(dim // 2))
    rotary = Rotary(cos=angles.cos(), sin=angles.sin(), interleaved=interleaved)
    norms = {
        "query_norm": Norm(kind=NormKind.RMS, weight=torch.rand(48), eps=1e-6),
        "key_norm": Norm(kind=NormKind.LAYER, weight=torch.rand(48), bias=torch.rand(48), eps=1e-6),
    }
    heads = torch.randn(41, 10, 48)
    results: list[torch.Tensor] = []
    for each in (kernels, reference):
        mine = heads.clone()  # query, key and value side by side, as one projection gives them
        query, key, value = mine[:, :6], mine[:, 6:8], mine[:, 8:]
        cache = each.allocate_kv(shape, num_blocks)
        each.rotate_and_write(shape, cache, batch, query, key, value, rotary=rotary, **norms)
        stored = each.read_kv(shape, cache, torch.from_numpy(batch.slot_mapping))
        assert torch.equal(stored[0], key)
        assert torch.equal(stored[1], value)
        results.append(mine)
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)
