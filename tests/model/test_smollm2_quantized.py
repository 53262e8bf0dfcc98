"""SmolLM2 with ``quantization``: how often the most likely token stays the same, and that neighbours change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.checkpoint import open_checkpoint
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.base import CausalLM
from asyncllm.models.registry import build_model
from tests.support.flat import FlatDriver
from tests.support.kernels import native_kernels

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
NUM_PIECES, PIECE = 8, 128

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def pieces(smollm2_folder: Path) -> list[list[int]]:
    """Eight stretches of a fixed text."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(LICENSE.read_text(encoding="utf-8")).ids
    return [ids[PIECE * at : PIECE * (at + 1)] for at in range(NUM_PIECES)]


def build(path: Path, quantization: str | None) -> CausalLM:
    method = NativeLinearMethod(native_kernels(), quantization)
    return build_model(open_checkpoint(str(path)), torch.float32, torch.device("cpu"), linear_method=method)


def logits(model: CausalLM, pieces: list[list[int]]) -> list[torch.Tensor]:
    return [FlatDriver(model, kernels=native_kernels(), max_tokens=PIECE).step({0: piece})[0] for piece in pieces]


def agreement(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    same = torch.cat(found).argmax(-1) == torch.cat(expected).argmax(-1)
    return float(same.float().mean())


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.95), ("int4", 0.95)])
def test_quantized_weights_seldom_change_the_most_likely_token(
    smollm2_folder: Path, pieces: list[list[int]], quantization: str, least: float
) -> None:
    """Measured on this text: 96.7 % with int8. These weights were made from 4 bits, so that int4 fits them better."""
    exact, found = (logits(build(smollm2_folder, choice), pieces) for choice in (None, quantization))
    assert agreement(found, exact) >= least


def test_integer_products_hardly_ever_change_the_most_likely_token(smollm2_gguf: Path, pieces: list[list[int]]) -> None:
    """The weights are the same; only the activations are rounded, to 16 bits."""
    exact, found = (logits(build(smollm2_gguf, choice), pieces) for choice in (None, "int8"))
    assert agreement(found, exact) >= 0.995
    torch.testing.assert_close(torch.cat(found), torch.cat(exact), rtol=0, atol=0.05)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_neighbours_and_chunks_change_no_bit(smollm2_folder: Path, pieces: list[list[int]], quantization: str) -> None:
    model = build(smollm2_folder, quantization)
    alone = logits(model, pieces)
    driver = FlatDriver(model, kernels=native_kernels(), max_rows=NUM_PIECES, max_tokens=PIECE)
    first = driver.step({row: piece[: 16 + row] for row, piece in enumerate(pieces)})
    rest = driver.step({row: piece[16 + row :] for row, piece in enumerate(pieces)})
    for row in range(NUM_PIECES):
        assert torch.equal(torch.cat((first[row], rest[row])), alone[row]), row
