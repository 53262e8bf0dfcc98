"""Gemma 3 270M converted from its GGUF for transformers.

Independent of what it tests: names and numbers of the tensors are those of the ``gguf`` package, the merges come from a
plain loop, and the tokenizer has the steps of Google's ``tokenizer.json``. Only the container is read by this package
(``gguf`` needs ten seconds for the lists of 262,144 tokens); other tests hold that reader to ``gguf``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm.checkpoint.gguf import GGUFFile

CONTROL, USER_DEFINED = 3, 4


@functools.lru_cache(maxsize=1)
def reference(gguf: Path) -> Any:
    """Return transformers' model with the numbers of the file, dequantized to float32.

    transformers reads GGUF files itself, but only where ``accelerate`` is installed.
    """
    import numpy as np
    import torch
    from gguf import MODEL_ARCH, GGMLQuantizationType, dequantize, get_tensor_name_map
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    file = GGUFFile(gguf)
    config = _config(file)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.tie_weights()
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    waiting = dict(file.tensors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = waiting.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
            data = np.frombuffer(file.tensor_bytes(tensor.name), np.uint8).reshape(*tensor.shape[:-1], -1)
            values = dequantize(data, GGMLQuantizationType[tensor.type_name])
            parameter.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
            if name.endswith("norm.weight"):
                parameter.sub_(1.0)
    assert not waiting
    return model


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
    import torch
    from safetensors.torch import save_file

    model = reference(gguf)
    weights = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    tokenizer = json.dumps(_tokenizer(GGUFFile(gguf).metadata), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))


def _config(file: GGUFFile) -> Any:
    from transformers import Gemma3TextConfig

    meta = file.metadata
    return Gemma3TextConfig(
        vocab_size=meta.length("tokenizer.ggml.tokens"),
        hidden_size=meta["gemma3.embedding_length"],
        intermediate_size=meta["gemma3.feed_forward_length"],
        num_hidden_layers=meta["gemma3.block_count"],
        num_attention_heads=meta["gemma3.attention.head_count"],
        num_key_value_heads=meta["gemma3.attention.head_count_kv"],
        head_dim=meta["gemma3.attention.key_length"],
        max_position_embeddings=meta["gemma3.context_length"],
        sliding_window=meta["gemma3.attention.sliding_window"],
        architectures=["Gemma3ForCausalLM"],
    )


def _tokenizer(meta: Mapping[str, Any]) -> dict[str, Any]:
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
