"""Weights on the native kernels: packed as they are stored, each once, and no other copy of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from asyncllm.kernels.base import Format, Kernels
from asyncllm.kernels.reference import TorchKernels
from asyncllm.layers import linear_native
from asyncllm.layers.embedding import Embedding
from asyncllm.layers.linear import Linear, Receiver, prepare_linear_layers
from asyncllm.layers.linear_native import NativeLinearMethod, packed_parts
from asyncllm.loader import QuantizedTensor
from tests.support.kernels import native_kernels

WHERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
K = 64


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels() if request.param == "native" else TorchKernels()


@pytest.fixture
def where(kernels: Kernels) -> dict[str, Any]:
    return WHERE | {"method": NativeLinearMethod(kernels)}


def quantized(type_name: str, rows: int, seed: int = 0) -> QuantizedTensor:
    numbers = np.random.default_rng(seed).standard_normal((rows, K)).astype(np.float32)
    return QuantizedTensor(type_name, torch.from_numpy(quantize(numbers, GGMLQuantizationType[type_name])))


def give(destination: Any, tensor: torch.Tensor | QuantizedTensor) -> None:
    receiver: Receiver = destination
    receiver.take(tensor)


def test_blocks_are_kept_as_they_are_stored_each_projection_in_its_own_format(where: dict[str, Any]) -> None:
    layer = Linear(K, (40, 8, 16), bias=False, **where)
    tensors = [quantized(name, rows) for name, rows in (("Q4_1", 40), ("Q8_0", 8), ("Q4_0", 16))]
    for destination, tensor in zip(layer.destinations("q", "k", "v").values(), tensors, strict=True):
        assert tuple(destination.shape) == tensor.shape
        give(destination, tensor)
    prepare_linear_layers(layer)
    assert [part.format for part in packed_parts(layer)] == [Format.Q4_1, Format.Q8_0, Format.Q4_0]
    x = torch.randn(5, K)
    dequantized = torch.cat([tensor.dequantize(torch.float32) for tensor in tensors])
    torch.testing.assert_close(layer(x), F.linear(x, dequantized), rtol=1e-4, atol=1e-4)


def test_a_row_of_quantized_projections_does_not_depend_on_its_neighbours() -> None:
    layer = Linear(K, (40, 8), bias=False, method=NativeLinearMethod(native_kernels()), **WHERE)
    for destination, name in zip(layer.destinations("q", "k").values(), ("Q4_1", "Q8_0"), strict=True):
        give(destination, quantized(name, destination.shape[0]))
    x = torch.randn(130, K)
    whole = layer(x)
    for rows in (1, 2, 5, 13, 97):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows


def test_a_type_that_the_kernels_lack_is_dequantized(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(linear_native.GGML_TYPE_TO_FORMAT, "Q5_1")
    layer = Linear(K, 40, bias=False, **where)
    tensor = quantized("Q5_1", 40)
    give(layer.destinations("o")["o.weight"], tensor)
    (part,) = packed_parts(layer)
    assert part.format == Format.F32
    x = torch.randn(5, K)
    torch.testing.assert_close(layer(x), F.linear(x, tensor.dequantize(torch.float32)), rtol=1e-4, atol=1e-4)


def test_a_type_that_the_kernels_lack_keeps_its_values_when_others_are_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(linear_native.GGML_TYPE_TO_FORMAT, "Q5_1")
    layer = Linear(K, (40, 8), bias=False, method=NativeLinearMethod(native_kernels(), "int8"), **WHERE)
    lacking, plain = quantized("Q5_1", 40), torch.randn(8, K)
    for destination, tensor in zip(layer.destinations("q", "k").values(), (lacking, plain), strict=True):
        give(destination, tensor)
    assert [(part.format, part.integer) for part in packed_parts(layer)] == [(Format.F32, False), (Format.Q8_0, True)]
    x = torch.randn(5, K)
    torch.testing.assert_close(layer(x)[:, :40], F.linear(x, lacking.dequantize(torch.float32)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [16, 33])
def test_any_number_of_inputs_can_be_quantized(size: int) -> None:
    layer = Linear(size, 40, bias=False, method=NativeLinearMethod(native_kernels(), "int8"), **WHERE)
    weight, x = torch.randn(40, size), torch.randn(5, size)
    give(layer.destinations("o")["o.weight"], weight)
    torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("dtype", "stored_as"),
    [
        (torch.bfloat16, Format.BF16),
        (torch.float16, Format.F16),
        (torch.float32, Format.F32),
        (torch.float64, Format.F32),
    ],
)
def test_plain_numbers_keep_their_dtype(where: dict[str, Any], dtype: torch.dtype, stored_as: Format) -> None:
    numbers = torch.randn(40, K, dtype=torch.float64).to(dtype)
    table = Embedding(40, K, **where)
    give(table.destinations("e")["e.weight"], numbers)
    assert [part.format for part in packed_parts(table)] == [stored_as]
    assert torch.equal(table(torch.tensor([3, 39, 3])), numbers[[3, 39, 3]].float())


def test_wide_numbers_that_were_narrow_are_stored_narrow(where: dict[str, Any]) -> None:
    layer = Linear(K, 40, bias=False, **where)
    give(layer.destinations("o")["o.weight"], torch.randn(40, K).bfloat16().float())
    assert [part.format for part in packed_parts(layer)] == [Format.BF16]


@pytest.mark.parametrize("bias_first", [True, False])
def test_biases_come_at_any_time(where: dict[str, Any], bias_first: bool) -> None:
    layer = Linear(K, (40, 8), bias=True, **where)
    weights, biases = [torch.randn(40, K), torch.randn(8, K)], [torch.randn(40), torch.randn(8)]
    destinations = layer.destinations("q", "k")
    for name, weight, bias in zip("qk", weights, biases, strict=True):
        steps = [
            lambda name=name, weight=weight: give(destinations[f"{name}.weight"], weight),
            lambda name=name, bias=bias: destinations[f"{name}.bias"].copy_(bias),
        ]
        for step in reversed(steps) if bias_first else steps:
            step()
    prepare_linear_layers(layer)
    x = torch.randn(3, K)
    torch.testing.assert_close(layer(x), F.linear(x, torch.cat(weights), torch.cat(biases)), rtol=1e-4, atol=1e-4)


def test_a_tied_head_shares_the_packed_table(where: dict[str, Any]) -> None:
    table, head = Embedding(40, K, **where), Linear(K, 40, bias=False, **where)
    head.tie(table)
    tensor = quantized("Q8_0", 40)
    give(table.destinations("e")["e.weight"], tensor)
    prepare_linear_layers(head)
    assert packed_parts(head)[0] is packed_parts(table)[0]
    numbers = tensor.dequantize(torch.float32)
    assert torch.equal(table(torch.tensor([7, 0])), numbers[[7, 0]])
    x = torch.randn(2, K)
    torch.testing.assert_close(head(x), F.linear(x, numbers), rtol=1e-4, atol=1e-4)


def test_nothing_is_allocated_before_the_weight_comes(where: dict[str, Any]) -> None:
    layer = Linear(K, (40, 8), bias=False, **where)
    assert list(layer.parameters()) == []
    assert packed_parts(layer) == [None, None]
