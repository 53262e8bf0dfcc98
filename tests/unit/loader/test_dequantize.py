"""Every tensor type that we read gives the numbers that the ``gguf`` package gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference_dequantize

from asyncllm.checkpoint.gguf import GGML_TYPES
from asyncllm.loader import dequantize as module
from asyncllm.loader.dequantize import DEQUANTIZED_TYPES, PLAIN_TYPES, dequantize

KINDS = {kind.name: kind for kind in GGML_TYPES.values()}
QUANTIZED = [name for name in DEQUANTIZED_TYPES if name not in PLAIN_TYPES]
HALF_OFFSETS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q8_0": (0,),
}


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Return random bytes whose scales are finite."""
    random = np.random.default_rng(len(name))
    blocks = random.integers(0, 256, (num_blocks, KINDS[name].block_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS[name]:
        scales = (random.standard_normal(num_blocks) * 0.1).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(num_blocks, 2)
    return blocks


@pytest.mark.parametrize("name", QUANTIZED)
def test_numbers_equal_the_reference_bit_for_bit(name: str) -> None:
    blocks = random_blocks(name, 37)
    ours = dequantize(memoryview(blocks).cast("B"), name, torch.float32)
    expected = reference_dequantize(blocks, GGMLQuantizationType[name])
    assert ours is not None
    assert np.array_equal(ours.numpy(), expected.reshape(-1))


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_tensor_longer_than_a_chunk_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(name, 11)
    whole = dequantize(memoryview(blocks).cast("B"), name, torch.float32)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * KINDS[name].block_elements)
    chunked = dequantize(memoryview(blocks).cast("B"), name, torch.float32)
    assert whole is not None
    assert chunked is not None
    assert torch.equal(whole, chunked)


def test_the_target_dtype_is_rounded_to_once() -> None:
    blocks = random_blocks("Q4_K", 5)
    data = memoryview(blocks).cast("B")
    wide, narrow = dequantize(data, "Q4_K", torch.float32), dequantize(data, "Q4_K", torch.bfloat16)
    assert wide is not None
    assert narrow is not None
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("F64", torch.float64)],
)
def test_plain_types_are_views_of_the_file(name: str, dtype: torch.dtype) -> None:
    numbers = torch.tensor([1.0, -2.5, 0.0, 3.0], dtype=dtype)
    data = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    value = dequantize(memoryview(data), name, torch.float32)
    assert value is not None
    assert value.dtype == dtype
    assert torch.equal(value, numbers)


def test_an_unread_type_is_none() -> None:
    assert dequantize(memoryview(bytearray(66)), "IQ2_XXS", torch.float32) is None


def test_the_type_table_equals_the_reference() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for number, kind in GGML_TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.block_elements, kind.block_bytes)
