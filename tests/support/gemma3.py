"""Gemma 3 270M converted from its GGUF to a Hugging Face folder, by names and rules of the ``gguf`` package.

Independent of this package's readers: the tensor names are gguf's own, the merges come from a plain double loop, and
the tokenizer has the steps of Google's ``tokenizer.json``.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

CONTROL, USER_DEFINED = 3, 4


@functools.lru_cache(maxsize=1)
def reference_of_gguf(gguf: Path) -> Any:
    """Return what transformers makes of the dequantized file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


def corrected(reference: Any, prompt: list[int], token_ids: list[int]) -> list[int]:
    """As :func:`tests.support.models.corrected`, with logits of the new tokens only: 262,144 numbers each."""
    import torch

    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *token_ids]]), logits_to_keep=len(token_ids) + 1).logits[0]
    best = logits[:-1].argmax(-1).tolist()
    for index, (token_id, best_id) in enumerate(zip(token_ids, best, strict=True)):
        if token_id != best_id:
            return [*token_ids[:index], best_id]
    return list(token_ids)


def convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a Hugging Face folder in bfloat16."""
    import numpy as np
    import torch
    from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = Gemma3TextConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["gemma3.embedding_length"],
        intermediate_size=meta["gemma3.feed_forward_length"],
        num_hidden_layers=meta["gemma3.block_count"],
        num_attention_heads=meta["gemma3.attention.head_count"],
        num_key_value_heads=meta["gemma3.attention.head_count_kv"],
        head_dim=meta["gemma3.attention.key_length"],
        max_position_embeddings=meta["gemma3.context_length"],
        sliding_window=meta["gemma3.attention.sliding_window"],
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
    )
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        wanted = [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]
    weights: dict[str, Any] = {}
    for name in wanted:
        tensor = tensors.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        weights[name] = (value - 1.0 if name.endswith("norm.weight") else value).bfloat16()
    assert not tensors
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(meta), ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    template = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    bos = meta["tokenizer.ggml.bos_token_id"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "special": kind == CONTROL, **flags}
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(tokens, meta["tokenizer.ggml.scores"], types),
        },
    }


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    rank = {token: index for index, token in enumerate(tokens)}
    found = [
        (-scores[index], index, rank[token[:cut]], rank[token[cut:]])
        for index, token in enumerate(tokens)
        if types[index] != CONTROL
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(found)]
