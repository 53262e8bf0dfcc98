"""Models on the native kernels: weights as they are stored, and the numbers of the same model on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from asyncllm.checkpoint import open_checkpoint
from asyncllm.kernels.base import Format, Kernels
from asyncllm.layers.linear import Matrix, TorchLinearMethod
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.base import CausalLM
from asyncllm.models.native import describe
from asyncllm.models.registry import build_model
from tests.support.flat import FlatDriver
from tests.support.gguf_files import llama_tensors, write_gguf
from tests.support.kernels import native_kernels
from tests.support.models import write_tiny_llama, write_tiny_opt

CPU = torch.device("cpu")
STEPS = [{0: [1, 2, 3, 4, 5]}, {1: [6, 7], 0: [3]}, {0: [2], 1: [1]}]
LAYER = "blk.0."
QUANTIZED = {
    "token_embd": "Q8_0",
    f"{LAYER}attn_q": "Q4_1",
    f"{LAYER}attn_k": "Q4_0",
    f"{LAYER}attn_v": "Q8_0",
    f"{LAYER}ffn_gate": "Q4_0",
    f"{LAYER}ffn_up": "Q5_1",
    f"{LAYER}ffn_down": "Q4_1",
}


@pytest.fixture
def kernels() -> Kernels:
    return native_kernels()


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """One layer whose projections have types of their own; the output projection stays float32."""
    kinds = {f"{name}.weight": GGMLQuantizationType[kind] for name, kind in QUANTIZED.items()}
    tensors = llama_tensors()
    packed = {name: quantize(tensors[name], kind) for name, kind in kinds.items()}
    return write_gguf(tmp_path / "mixed.gguf", tensors=tensors | packed, raw_types=kinds)


def build(path: Path, kernels: Kernels | None = None, quantization: str | None = None) -> CausalLM:
    method = NativeLinearMethod(kernels, quantization) if kernels is not None else None
    return build_model(open_checkpoint(str(path)), torch.float32, CPU, linear_method=method)


def assert_same_logits(found: FlatDriver, expected: FlatDriver) -> None:
    for step in STEPS:
        ours, theirs = found.step(step), expected.step(step)
        for row in step:
            torch.testing.assert_close(ours[row], theirs[row], rtol=1e-4, atol=1e-4)


def test_every_projection_of_a_gguf_keeps_its_type(gguf: Path, kernels: Kernels) -> None:
    spec = describe(build(gguf, kernels), block_size=16)
    (layer,) = spec.layers
    parts: list[Any] = [spec.embedding, layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
    names = ["Q8_0", "Q4_1", "Q4_0", "Q8_0", "F32", "Q4_0", "Q5_1", "Q4_1"]
    assert [part.format for part in parts] == [Format[name] for name in names]
    assert spec.head is spec.embedding


def test_a_mixed_gguf_gives_the_numbers_of_its_dequantized_weights(gguf: Path, kernels: Kernels) -> None:
    assert_same_logits(FlatDriver(build(gguf, kernels), kernels=kernels), FlatDriver(build(gguf)))


def test_the_same_weights_serve_another_attention_backend(gguf: Path, kernels: Kernels) -> None:
    assert_same_logits(FlatDriver(build(gguf, kernels)), FlatDriver(build(gguf)))


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_opt])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_a_folder_gives_the_numbers_of_torch(tmp_path: Path, kernels: Kernels, write: Any, options: Any) -> None:
    folder = write(tmp_path, **options)
    assert_same_logits(FlatDriver(build(folder, kernels), kernels=kernels), FlatDriver(build(folder)))


@pytest.mark.parametrize(("quantization", "plain"), [("int8", "Q8_0"), ("int4", "Q4_1")])
def test_quantization_makes_plain_matrices_small_and_keeps_quantized_ones(
    gguf: Path, kernels: Kernels, quantization: str, plain: str
) -> None:
    spec = describe(build(gguf, kernels, quantization), block_size=16)
    (layer,) = spec.layers
    parts: list[Any] = [spec.embedding, layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
    names = ["Q8_0", "Q4_1", "Q4_0", "Q8_0", plain, "Q4_0", "Q5_1", "Q4_1"]
    assert [part.format for part in parts] == [Format[name] for name in names]
    assert all(part.integer for part in parts)


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_opt])
def test_four_bits_leave_embedding_and_head_at_eight(tmp_path: Path, kernels: Kernels, write: Any) -> None:
    spec = describe(build(write(tmp_path, tie_word_embeddings=False), kernels, "int4"), block_size=16)
    assert [spec.embedding.format, spec.head.format] == [Format.Q8_0, Format.Q8_0]
    assert {layer.down.format for layer in spec.layers} == {Format.Q4_1}


@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_opt])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_gives_the_numbers_of_its_weights_whoever_shares_the_step(
    tmp_path: Path, kernels: Kernels, write: Any, quantization: str
) -> None:
    """As near to the model with the dequantized weights as 16-bit activations are, alone and in a batch."""
    model = build(write(tmp_path), kernels, quantization)
    alone = FlatDriver(model, kernels=kernels).step({0: [1, 2, 3, 4, 5]})[0]
    together = FlatDriver(model, kernels=kernels).step({1: [6, 7], 0: [1, 2, 3, 4, 5], 2: [9] * 40})[0]
    assert torch.equal(alone, together)
    plain = build_model(open_checkpoint(str(write(tmp_path))), torch.float32, CPU, linear_method=TorchLinearMethod())
    pairs = [pair for pair in zip(model.modules(), plain.modules(), strict=True) if isinstance(pair[0], Matrix)]
    with torch.no_grad():
        for ours, theirs in pairs:
            parts = [kernels.gather_rows(part, torch.arange(part.n)) for part in ours.prepared]
            cast(Matrix, theirs).weight.copy_(torch.cat(parts))
    expected = FlatDriver(plain).step({0: [1, 2, 3, 4, 5]})[0]
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-3)


def test_only_vectors_are_parameters(tmp_path: Path, kernels: Kernels) -> None:
    model = build(write_tiny_llama(tmp_path), kernels)
    assert {parameter.ndim for parameter in model.parameters()} == {1}
