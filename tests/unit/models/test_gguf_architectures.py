"""A GGUF file of each architecture gives the logits of the transformers model that it was written from.

Tensors get the names of the ``gguf`` package and what llama.cpp's converter does to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.models.registry import build_model
from tests.support.flat import FlatDriver
from tests.support.gguf_files import write_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
}
WINDOW = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2}
KINDS = ["sliding_attention", "full_attention"] * 2
GEMMA3 = SIZES | {"head_dim": 20, "query_pre_attn_scalar": 20, "sliding_window": 7, "layer_types": KINDS}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LINEAR_KEYS = {
    "rope.freq_base": 3e4,
    "rope.freq_base_swa": 500.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {  # transformers' name, GGUF's, options, keys
    "llama": ("llama", "llama", SIZES, {}),
    "qwen2": ("qwen2", "qwen2", SIZES, {}),
    "qwen3": ("qwen3", "qwen3", SIZES | {"head_dim": 12, "tie_word_embeddings": True}, {}),
    "gemma3": ("gemma3_text", "gemma3", GEMMA3, WINDOW),
    "gemma3-flags": ("gemma3_text", "gemma3", GEMMA3, WINDOW | {"attention.sliding_window_pattern": [True, False] * 2}),
    "gemma3-period": (
        "gemma3_text",
        "gemma3",
        GEMMA3 | {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
        {"attention.sliding_window": 7, "block_count": 6},
    ),
    "gemma3-no-window": (
        "gemma3_text",
        "gemma3",
        GEMMA3 | {"layer_types": ["full_attention"] * 4},
        {},
    ),
    "gemma3-scaled-rope": ("gemma3_text", "gemma3", GEMMA3 | {"rope_parameters": LINEAR}, WINDOW | LINEAR_KEYS),
}
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def write(path: Path, model: Any, architecture: str, keys: dict[str, Any]) -> Path:
    """Write ``model`` as llama.cpp's converter would; ``keys`` are added to the metadata, ``None`` leaves one out."""
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        **keys,
    }
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and part in name:  # as LlamaModel.permute
                value = value.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(value.shape)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value.contiguous().numpy()
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"]}
    values = {f"{architecture}.{key}": value for key, value in metadata.items() if value is not None}
    return write_gguf(path, values | tokens, tensors, architecture=architecture)


def make(model_type: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_model_that_was_written(tmp_path: Path, case: str) -> None:
    model_type, architecture, options, keys = CASES[case]
    reference = make(model_type, options)
    path = write(tmp_path / "m.gguf", reference, architecture, keys)
    model = build_model(open_checkpoint(str(path)), torch.float32, torch.device("cpu"))
    token_ids = torch.randint(0, 99, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(FlatDriver(model).step({0: token_ids})[0], expected, rtol=0, atol=2e-5)


def test_the_scores_of_the_27b_model_are_scaled_by_hidden_size_over_heads(tmp_path: Path) -> None:
    """llama.cpp tells it by its 62 layers, too; the scale is not in the file."""
    layers = {"num_hidden_layers": 62, "layer_types": KINDS[:2] * 31}
    path = write(tmp_path / "m.gguf", make("gemma3_text", GEMMA3 | layers), "gemma3", WINDOW)
    assert open_checkpoint(str(path)).config["query_pre_attn_scalar"] == 48 // 6


def test_soft_capping_in_a_file_is_refused_by_name(tmp_path: Path) -> None:
    keys = WINDOW | {"final_logit_softcapping": 30.0}
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", make("gemma3_text", GEMMA3), "gemma3", keys)))
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping=30\.0"):
        build_model(checkpoint, torch.float32, torch.device("cpu"))


def test_flags_for_another_number_of_layers_are_damage(tmp_path: Path) -> None:
    keys = WINDOW | {"attention.sliding_window_pattern": [True, False]}
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", make("gemma3_text", GEMMA3), "gemma3", keys)))
    with pytest.raises(CheckpointError, match="2 layer_types for 4 layers"):
        build_model(checkpoint, torch.float32, torch.device("cpu"))
