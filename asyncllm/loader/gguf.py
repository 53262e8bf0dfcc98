"""Weights of a GGUF file: under their Hugging Face names, with rows in Hugging Face order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from asyncllm.loader.dequantize import TYPE_TO_FUNCTION, QuantizedTensor, dequantize

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint
    from asyncllm.checkpoint.gguf import GGUFFile, GGUFTensor

__all__ = ["iter_gguf"]

RELEASE_BYTES = 16 << 20
"""After how many bytes of the file the memory that holds them is let go."""

Transform = Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class NameTable:
    """How one GGUF architecture names its tensors, and what it did to them."""

    layer: dict[str, str]
    """``blk.N.KEY.weight`` is ``model.layers.N.VALUE.weight``; the same for ``bias``."""
    transforms: dict[str, Transform] = field(default_factory=dict[str, Transform])
    """By the name in ``layer`` or :data:`TOP`: undoes what the conversion to GGUF did."""

    def translate(self, name: str) -> tuple[str, Transform | None]:
        """Return the Hugging Face name of ``name`` and what is to be undone; an unknown name as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in TOP:
            return f"{TOP[stem]}.{kind}", self.transforms.get(stem)
        block, _, part = stem.removeprefix("blk.").partition(".")
        if not stem.startswith("blk.") or part not in self.layer:
            return name, None
        return f"model.layers.{block}.{self.layer[part]}.{kind}", self.transforms.get(part)


def _split_rotary_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows with the two rotary halves of each head one after the other.

    llama.cpp rotates neighbours (0, 1), (2, 3), …; its converter reorders the rows of query and key for that. Works
    for a weight [H * D, hidden], for its quantized rows [H * D, bytes], and for a bias [H * D].
    """
    pairs = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _query_rows(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return _split_rotary_pairs(tensor, config["num_attention_heads"])


def _key_rows(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return _split_rotary_pairs(tensor, config["num_key_value_heads"])


def _distance_from_one(weight: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Return a norm's weight as Gemma's own checkpoints hold it; llama.cpp's converter adds the one."""
    return weight - 1.0


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
READ_ELSEWHERE = frozenset({"rope_freqs.weight"})  # part of the configuration
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_NORMS = ("attn_norm", "output_norm", *HEAD_NORMS, *FOUR_NORMS)

MODEL_TYPE_TO_NAMES = {
    "gemma3_text": NameTable(LAYER | HEAD_NORMS | FOUR_NORMS, dict.fromkeys(GEMMA3_NORMS, _distance_from_one)),
    "llama": NameTable(LAYER, {"attn_q": _query_rows, "attn_k": _key_rows}),
    "qwen2": NameTable(LAYER),
    "qwen3": NameTable(LAYER | HEAD_NORMS),
}


def iter_gguf(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor, float]]:
    """Yield name, tensor and the fraction of all bytes that this one completes.

    :raises UnsupportedModelError: a tensor type is not one that we read; names it.
    """
    file = checkpoint.gguf
    assert file is not None
    names = MODEL_TYPE_TO_NAMES[checkpoint.config["model_type"]]
    total = sum(tensor.num_bytes for tensor in file.tensors.values()) or 1
    done = released = 0
    for tensor in file.tensors.values():
        done += tensor.num_bytes
        if tensor.name in READ_ELSEWHERE:
            continue
        name, transform = names.translate(tensor.name)
        value = _read(file, tensor)
        if value is None:
            feature = f"GGUF tensor type {tensor.type_name}"
            raise checkpoint.unsupported(
                f"has {tensor.name!r} in {tensor.type_name}, which we do not read", feature=feature
            )
        yield name, value if transform is None else _transformed(value, transform, checkpoint.config), done / total
        if done - released >= RELEASE_BYTES:
            file.release()
            released = done
    file.release()


def _read(file: GGUFFile, tensor: GGUFTensor) -> torch.Tensor | QuantizedTensor | None:
    """Return ``tensor``; ``None`` if it is of a type that we do not read. Only matrices stay quantized."""
    data = file.tensor_bytes(tensor.name)
    if tensor.type_name in TYPE_TO_FUNCTION and len(tensor.shape) == 2:
        rows = torch.frombuffer(data, dtype=torch.uint8).view(tensor.shape[0], -1)
        return QuantizedTensor(tensor.type_name, rows)
    value = dequantize(data, tensor.type_name, torch.float32)
    return None if value is None else value.view(tensor.shape)


def _transformed(
    value: torch.Tensor | QuantizedTensor, transform: Transform, config: Mapping[str, Any]
) -> torch.Tensor | QuantizedTensor:
    if isinstance(value, QuantizedTensor):  # whole rows change their places, so it does not matter what is in them
        return replace(value, blocks=transform(value.blocks, config))
    return transform(value, config)
