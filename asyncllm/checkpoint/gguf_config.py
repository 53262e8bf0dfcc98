"""The metadata of a GGUF file as the three configuration files of a Hugging Face folder.

Each architecture is one function in :data:`ARCHITECTURE_TO_CONFIG`. A feature that the function does not translate is
refused by name, never dropped: a model that runs with part of its configuration gives plausible wrong text.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, cast

from asyncllm.errors import CheckpointError, UnsupportedModelError, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.checkpoint.gguf import GGUFFile

__all__ = ["make_config", "make_generation_config", "make_tokenizer_config"]

MAX_COUNT = 2**31 - 1
TOKENS = "tokenizer.ggml.tokens"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ids that end a text or a turn; llama.cpp stops at each of them."""

SPECIAL_TOKEN_TO_KEY = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}

SAMPLING_KEY_TO_PARAMETER = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class _Section:
    """The metadata below one architecture's prefix, with typed errors for what is missing."""

    def __init__(self, file: GGUFFile, model: str, prefix: str) -> None:
        self.file = file
        self.model = model
        self.prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            file = self.file.path.name
            raise CheckpointError(f"{file} has no key '{self.prefix}.{name}'", model=self.model, file=file)
        return value

    def count(self, name: str, value: Any) -> int:
        """Return ``value``, which ``name`` gave, if it is a number of things."""
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            file = self.file.path.name
            raise CheckpointError(
                f"{file} has '{self.prefix}.{name}' = {shown(value)!r}; it must be a positive integer of 31 bits",
                model=self.model,
                file=file,
            )
        return value

    def per_layer(self, name: str, default: Any = None) -> Any:
        """Return a number that may be written once per layer, but must then be the same for each."""
        value: Any = self.get(name, default)
        if not isinstance(value, list):
            return value
        values = cast("list[Any]", value)
        if not values or values.count(values[0]) != len(values):
            raise self.unsupported(f"layers that differ in {self.prefix}.{name}")
        return values[0]

    def unsupported(self, feature: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.file.path.name} needs {feature}, which is not supported", model=self.model, feature=feature
        )


def make_config(file: GGUFFile, model: str) -> dict[str, Any]:
    """Return what ``config.json`` would hold.

    :raises UnsupportedModelError: the architecture, or something in its metadata, is not one that we translate.
    :raises CheckpointError: a key or tensor that every such file has is missing.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{file.path.name} has no key 'general.architecture'", model=model, file=file.path.name)
    translate = ARCHITECTURE_TO_CONFIG.get(architecture)
    if translate is None:
        known = ", ".join(sorted(ARCHITECTURE_TO_CONFIG))
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {architecture!r}; as GGUF we run: {known}",
            model=model,
            feature=f"GGUF architecture {architecture}",
        )
    section = _Section(file, model, architecture)
    if file.metadata.get("split.count", 1) > 1:
        raise section.unsupported("a GGUF that is split into several files")
    return translate(section)


def make_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return what ``generation_config.json`` would hold: the ids that end a text, and sampling defaults if any."""
    ids = {
        name: file.metadata.get(f"tokenizer.ggml.{name}") for name in (*END_KEYS, "bos_token_id", "padding_token_id")
    }
    ends = list(dict.fromkeys(ids[name] for name in END_KEYS if ids[name] is not None))
    config: dict[str, Any] = {
        "bos_token_id": ids["bos_token_id"],
        "eos_token_id": ends or None,
        "pad_token_id": ids["padding_token_id"],
    }
    for key, parameter in SAMPLING_KEY_TO_PARAMETER.items():
        if key in file.metadata:
            config[parameter] = file.metadata[key]
    return config


def make_tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """Return what ``tokenizer_config.json`` would hold: special tokens, whether they are added, chat templates."""
    metadata = file.metadata
    config: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token"),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token"),
    }
    num_tokens = metadata.length(TOKENS)
    for token, key in SPECIAL_TOKEN_TO_KEY.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        known = isinstance(token_id, int) and 0 <= token_id < num_tokens
        config[token] = metadata[TOKENS][token_id] if known else None
    names: list[str] = metadata.get("tokenizer.chat_templates", [])
    templates = {name: metadata[key] for name in names if (key := f"tokenizer.chat_template.{name}") in metadata}
    if default := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = default
        templates = {"default": default, **templates}
    if len(templates) > 1:
        config["chat_templates"] = templates
    return config


def _llama(section: _Section) -> dict[str, Any]:
    """Return the configuration of a ``llama`` file, which holds Mistral and others of the same shape too."""
    tensors = section.file.tensors
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "hidden_act": "silu",
        **_decoder(section),
    }


def _qwen2(section: _Section) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **_decoder(section)}


def _qwen3(section: _Section) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", **_decoder(section)}


def _gemma3(section: _Section) -> dict[str, Any]:
    """Return the configuration of the language model of Gemma 3; what it has for images is in another file."""
    shared = _decoder(section)
    layers, window = shared["num_hidden_layers"], section.get("attention.sliding_window")
    # What scales the scores is not in the file; llama.cpp knows that of the 27B model by its 62 layers.
    scalar = shared["hidden_size"] // shared["num_attention_heads"] if layers == 62 else shared["head_dim"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        **shared,
        "attn_logit_softcapping": section.get("attn_logit_softcapping"),
        "final_logit_softcapping": section.get("final_logit_softcapping"),
        "layer_types": _layer_types(section, layers) if window else ["full_attention"] * layers,
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": section.get("rope.freq_base_swa", 10000.0),
        "rope_theta": section.get("rope.freq_base", 1000000.0),
        "sliding_window": window or None,
    }


def _layer_types(section: _Section, num_layers: int) -> list[str]:
    """Return which layers see a window only, from one flag per layer or from the period of those that see all."""
    pattern: Any = section.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, list):
        pattern = section.count("attention.sliding_window_pattern", pattern)
        pattern = [bool((index + 1) % pattern) for index in range(num_layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in cast("list[Any]", pattern)]


def _decoder(section: _Section) -> dict[str, Any]:
    """Return what files of all our architectures say alike."""
    prefix = section.prefix
    if section.get("expert_count", 0):
        raise section.unsupported(f"experts ({prefix}.expert_count)")
    hidden_size = section.count("embedding_length", section.need("embedding_length"))
    num_heads = section.per_layer("attention.head_count") or section.need("attention.head_count")
    num_heads = section.count("attention.head_count", num_heads)
    head_dim = section.get("attention.key_length", hidden_size // num_heads)
    if section.get("attention.value_length", head_dim) != head_dim:
        raise section.unsupported(f"values of another width than keys ({prefix}.attention.value_length)")
    if section.get("rope.dimension_count", head_dim) != head_dim:
        raise section.unsupported(f"rotary positions on a part of each head ({prefix}.rope.dimension_count)")
    return {
        "bos_token_id": section.file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": section.file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": section.file.metadata.get("tokenizer.ggml.padding_token_id"),
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": section.per_layer("feed_forward_length") or section.need("feed_forward_length"),
        "max_position_embeddings": section.need("context_length"),
        "num_attention_heads": num_heads,
        "num_hidden_layers": _num_layers(section),
        "num_key_value_heads": section.per_layer("attention.head_count_kv", num_heads),
        "rms_norm_eps": section.need("attention.layer_norm_rms_epsilon"),
        "rope_scaling": _rope_scaling(section),
        "rope_theta": section.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in section.file.tensors,
        "vocab_size": _vocab_size(section),
    }


def _num_layers(section: _Section) -> int:
    """Return the number of layers, for which there is a tensor each at least: a damaged number can be billions."""
    count = section.count("block_count", section.need("block_count"))
    if count > len(section.file.tensors):
        file = section.file.path.name
        raise CheckpointError(
            f"{file} has '{section.prefix}.block_count' = {count}, but {len(section.file.tensors)} tensors",
            model=section.model,
            file=file,
        )
    return count


def _vocab_size(section: _Section) -> int:
    """Return the rows of the embedding, which can be more than there are tokens (padding to a round number)."""
    embedding = section.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        file = section.file.path.name
        raise CheckpointError(
            f"{file} has no tensor 'token_embd.weight' of two dimensions", model=section.model, file=file
        )
    return embedding.shape[0]


def _rope_scaling(section: _Section) -> dict[str, Any] | None:
    """Return how rotary positions are stretched, in the form of ``rope_scaling``; ``None``: not at all.

    Llama 3's scaling is stored as its result, one divisor per frequency (tensor ``rope_freqs.weight``); there is no
    such type in Hugging Face files, so it has a name of our own, ``factors``.
    """
    factors = _rope_factors(section)
    kind = section.get("rope.scaling.type", "none")
    factor = section.get("rope.scaling.factor", section.get("rope.scale_linear", 1.0))
    if kind == "none":
        kind = "linear" if section.get("rope.scale_linear", 1.0) != 1.0 else "none"
    if factors is not None:
        if kind != "none" and factor != 1.0:
            raise section.unsupported(f"rotary scaling {kind!r} together with rope_freqs.weight")
        return {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(section, factor)
    raise section.unsupported(f"rotary scaling {kind!r}")


def _yarn(section: _Section, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": section.need("rope.scaling.original_context_length"),
    }
    for key, name in (
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := section.get(f"rope.scaling.{key}")) is not None:
            scaling[name] = value
    return scaling


def _rope_factors(section: _Section) -> list[float] | None:
    tensor = section.file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type_name != "F32":
        raise section.unsupported(f"rope_freqs.weight of type {tensor.type_name}")
    factors = struct.unpack(f"<{tensor.num_bytes // 4}f", section.file.tensor_bytes("rope_freqs.weight"))
    return None if all(factor == 1.0 for factor in factors) else list(factors)


ARCHITECTURE_TO_CONFIG: dict[str, Callable[[_Section], dict[str, Any]]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
"""``general.architecture`` of a GGUF file to the function that makes its configuration."""
