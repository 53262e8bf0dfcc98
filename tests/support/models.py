"""Checkpoints for tests: tiny random ones from transformers configs, and SmolLM2 converted from its GGUF.

transformers writes and reads these folders, so they are an independent reference for this package's own readers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


# -------------------------------------------------------------------------------------------------------- tiny, random
def write_tiny_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama of two layers, with ``overrides`` of its LlamaConfig, and return ``folder``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    return _write(folder, LlamaForCausalLM, LlamaConfig(**_with_tokens(options | overrides)), seed)


def write_tiny_opt(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random OPT of two layers, with ``overrides`` of its OPTConfig, and return ``folder``."""
    from transformers import OPTConfig, OPTForCausalLM

    options: dict[str, Any] = {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "do_layer_norm_before": True,
    }
    return _write(folder, OPTForCausalLM, OPTConfig(**_with_tokens(options | overrides)), seed)


def write_tiny_gemma3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Gemma 3 of three layers, the outer ones with a window, and return ``folder``."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    options: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "query_pre_attn_scalar": 24,
        "sliding_window": 21,  # ends inside a block of the prefix cache
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 512,
    }
    return _write(folder, Gemma3ForCausalLM, Gemma3TextConfig(**_with_tokens(options | overrides)), seed)


def write_tiny_qwen3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen 3 of two layers, which normalises query and key heads, and return ``folder``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return _write(folder, Qwen3ForCausalLM, Qwen3Config(**_with_tokens(options | overrides)), seed)


def _with_tokens(options: dict[str, Any]) -> dict[str, Any]:
    from asyncllm.testing import BOS, EOS, TINY_VOCAB_SIZE

    return {"vocab_size": TINY_VOCAB_SIZE, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS} | options


def _write(folder: Path, model_class: Any, config: Any, seed: int) -> Path:
    import torch

    from asyncllm.testing import write_tiny_checkpoint

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():  # the default 0.02 leaves logits so flat that greedy ties are likely
            for parameter in model.parameters():
                parameter.copy_(parameter + torch.randn_like(parameter) * 0.1)
    write_tiny_checkpoint(folder)
    model.save_pretrained(folder)  # its config.json and generation_config.json replace the weightless ones
    return folder


# ------------------------------------------------------------------------------------------------------ from the GGUF
LAYER_NAMES = {
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
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL, USER_DEFINED = 3, 4  # token types that are matched before the byte-pair merges


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama GGUF with a byte-level BPE tokenizer as a Hugging Face folder in float32.

    Two details differ between the formats: llama.cpp stores query and key rows in rotary pairs, and its "smollm"
    pre-tokenizer splits every digit off before the byte-level split (transformers' own GGUF reader leaves that out).
    """
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = meta["llama.attention.head_count"]
    kv_heads = meta.get("llama.attention.head_count_kv", heads)
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            value = _rotary_halves(value, heads if ".attn_q." in tensor.name else kv_heads)
        weights[_hf_name(tensor.name)] = value.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _llama_config(meta, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", {"eos_token_id": meta["tokenizer.ggml.eos_token_id"]})
    _write_json(folder / "tokenizer.json", _tokenizer_json(meta))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = meta["tokenizer.ggml.tokens"]
    special = {f"{hf}_token": tokens[meta[f"tokenizer.ggml.{gg}_token_id"]] for hf, gg in names.items()}
    template = {"chat_template": meta["tokenizer.chat_template"]}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special, **template})


def _rotary_halves(weight: Any, heads: int) -> Any:
    """Rows in rotary pairs (x0, y0), (x1, y1), ... -> x0, x1, ..., y0, y1, ... in each head."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{TOP_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _llama_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),  # 9.99999974e-06 is float32's 1e-05
        "rope_theta": round(meta.get("llama.rope.freq_base", 10000.0), 3),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _tokenizer_json(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, byte_level] if meta.get("tokenizer.ggml.pre") == "smollm" else [byte_level]
    kinds = enumerate(zip(tokens, meta["tokenizer.ggml.token_type"], strict=True))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "special": kind == CONTROL, **flags}
            for index, (token, kind) in kinds
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------------ the reference
@functools.lru_cache(maxsize=4)
def reference(folder: Path) -> Any:
    """Return what transformers makes of a checkpoint folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the most likely tokens after ``prompt`` by transformers; ends of sequence do not end it."""
    return list(_greedy(folder, tuple(prompt), num_tokens))


@functools.lru_cache(maxsize=512)
def _greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    import torch

    with torch.inference_mode():
        ids = reference(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def corrected(folder: Path, prompt: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """Return ``token_ids`` up to the first that is not transformers' most likely one after those before it, corrected.

    Equal to ``token_ids`` if and only if these are what greedy decoding gives, by induction over the positions; one
    forward pass instead of one per token.
    """
    logprobs = log_probabilities(folder, [*prompt, *token_ids])
    best = logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
    for index, (token_id, best_id) in enumerate(zip(token_ids, best, strict=True)):
        if token_id != best_id:
            return [*token_ids[:index], best_id]
    return list(token_ids)


def log_probabilities(folder: Path, token_ids: Sequence[int]) -> Any:
    """Return [T, vocabulary]: the log-softmax of transformers' logits after each token."""
    import torch

    with torch.inference_mode():
        return reference(folder)(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
