"""Weights of a GGUF file: under their Hugging Face names, dequantized, with rows in Hugging Face order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from asyncllm.loader.dequantize import dequantize

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint

__all__ = ["iter_gguf"]

Transform = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class NameTable:
    """How one GGUF architecture names its tensors, and what it did to them."""

    layer: dict[str, str]
    """``blk.N.KEY.weight`` is ``model.layers.N.VALUE.weight``; the same for ``bias``."""
    top: dict[str, str]
    ignored: frozenset[str] = frozenset()
    """Tensors that are read elsewhere."""
    transforms: dict[str, Transform] = field(default_factory=dict[str, Transform])
    """By the name in ``layer``: undoes what the conversion to GGUF did."""

    def translate(self, name: str) -> tuple[str, Transform | None]:
        """Return the Hugging Face name of ``name`` and what is to be undone; an unknown name as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in self.top:
            return f"{self.top[stem]}.{kind}", None
        block, _, part = stem.removeprefix("blk.").partition(".")
        if not stem.startswith("blk.") or part not in self.layer:
            return name, None
        return f"model.layers.{block}.{self.layer[part]}.{kind}", self.transforms.get(part)


def _split_rotary_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows with the two rotary halves of each head one after the other.

    llama.cpp rotates neighbours (0, 1), (2, 3), …; its converter reorders the rows of query and key for that. Works
    for a weight [H * D, hidden] and for a bias [H * D].
    """
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _query_rows(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return _split_rotary_pairs(tensor, config["num_attention_heads"])


def _key_rows(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return _split_rotary_pairs(tensor, config["num_key_value_heads"])


LLAMA = NameTable(
    layer={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    top={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    ignored=frozenset({"rope_freqs.weight"}),  # part of the configuration
    transforms={"attn_q": _query_rows, "attn_k": _key_rows},
)

MODEL_TYPE_TO_NAMES = {"llama": LLAMA}


def iter_gguf(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Yield name, tensor and the fraction of all bytes that this one completes; quantized tensors in ``dtype``.

    :raises UnsupportedModelError: a tensor type is not one that we dequantize; names it.
    """
    file = checkpoint.gguf
    assert file is not None
    names = MODEL_TYPE_TO_NAMES[checkpoint.config["model_type"]]
    total = sum(tensor.num_bytes for tensor in file.tensors.values()) or 1
    done = 0
    for tensor in file.tensors.values():
        done += tensor.num_bytes
        if tensor.name in names.ignored:
            continue
        name, transform = names.translate(tensor.name)
        value = dequantize(file.tensor_bytes(tensor.name), tensor.type_name, dtype)
        if value is None:
            feature = f"GGUF tensor type {tensor.type_name}"
            raise checkpoint.unsupported(
                f"has {tensor.name!r} in {tensor.type_name}, which we do not read", feature=feature
            )
        value = value.view(tensor.shape)
        yield name, value if transform is None else transform(value, checkpoint.config), done / total
    file.release()
