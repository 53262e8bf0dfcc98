"""A GGUF file's metadata as Hugging Face configuration: nothing is lost, and what cannot be said is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm.checkpoint import Checkpoint, open_checkpoint
from asyncllm.errors import CheckpointError, UnsupportedModelError
from tests.support.gguf_files import LLAMA_METADATA, llama_tensors, write_gguf


def opened(tmp_path: Path, tensors: dict[str, np.ndarray] | None = None, /, **metadata: Any) -> Checkpoint:
    """Open a tiny Llama with changed metadata; ``__`` stands for a dot, ``None`` leaves a key out."""
    changed = LLAMA_METADATA | {key.replace("__", "."): value for key, value in metadata.items()}
    kept = {key: value for key, value in changed.items() if value is not None}
    return open_checkpoint(str(write_gguf(tmp_path / "m.gguf", kept, tensors)))


def test_a_llama_file_becomes_a_llama_config(tmp_path: Path) -> None:
    config = opened(tmp_path).config
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 8,
    }


def test_the_vocabulary_is_the_rows_of_the_embedding_not_the_number_of_tokens(tmp_path: Path) -> None:
    assert opened(tmp_path, llama_tensors(vocab_size=64)).vocab_size == 64


def test_key_value_heads_default_to_all_heads(tmp_path: Path) -> None:
    assert opened(tmp_path, llama__attention__head_count_kv=None).config["num_key_value_heads"] == 4


def test_head_dim_may_differ_from_hidden_by_heads(tmp_path: Path) -> None:
    config = opened(tmp_path, llama__attention__key_length=16, llama__attention__value_length=16).config
    assert config["head_dim"] == 16


def test_a_head_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"output.weight": np.zeros((8, 32), np.float32)}
    assert opened(tmp_path, tensors).config["tie_word_embeddings"] is False


def test_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    assert opened(tmp_path, tensors).config["attention_bias"] is True


# ------------------------------------------------------------------------------------------------------------- scaling
def test_linear_rotary_scaling(tmp_path: Path) -> None:
    config = opened(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_the_older_key_of_linear_rotary_scaling(tmp_path: Path) -> None:
    assert opened(tmp_path, llama__rope__scale_linear=2.0).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }


def test_yarn_rotary_scaling(tmp_path: Path) -> None:
    config = opened(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=8.0,
        llama__rope__scaling__original_context_length=16,
    ).config
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}


def test_llama_3_scaling_is_read_from_its_tensor(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    config = opened(tmp_path, llama_tensors() | {"rope_freqs.weight": factors}).config
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.5, 4.0, 8.0]}


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)}
    assert opened(tmp_path, tensors).config["rope_scaling"] is None


# ---------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("metadata", "feature"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__rope__dimension_count": 4}, "part of each head"),
        ({"llama__attention__value_length": 4}, "another width"),
        ({"llama__attention__head_count": [4, 2]}, "differ"),
        ({"split__count": 3}, "split"),
    ],
)
def test_what_we_do_not_run_is_refused_by_name(tmp_path: Path, metadata: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError, match=feature):
        opened(tmp_path, **metadata)


def test_another_architecture_lists_what_is_known(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'; as GGUF we run: gemma3, llama, qwen2, qwen3"):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    "key",
    ["embedding_length", "block_count", "context_length", "attention.layer_norm_rms_epsilon", "attention.head_count"],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"llama.{key}"):
        opened(tmp_path, **{f"llama.{key}": None})


@pytest.mark.parametrize("value", [0, 2**31 - 1, "many", 1.5], ids=str)
@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "embedding_length"])
def test_a_number_that_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    if key != "block_count" and value == 2**31 - 1:
        value = 2**31
    with pytest.raises(CheckpointError, match=f"llama.{key}"):
        opened(tmp_path, **{f"llama.{key}": value})


@pytest.mark.parametrize("value", [0, 2**31, "six"], ids=str)
def test_a_period_of_windows_that_cannot_be_is_named(tmp_path: Path, value: object) -> None:
    metadata = {key.replace("llama.", "gemma3."): known for key, known in LLAMA_METADATA.items()}
    metadata |= {"gemma3.attention.sliding_window": 16, "gemma3.attention.sliding_window_pattern": value}
    path = write_gguf(tmp_path / "m.gguf", metadata, architecture="gemma3")
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.sliding_window_pattern"):
        open_checkpoint(str(path))


def test_a_missing_embedding_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        opened(tmp_path, tensors)


# ------------------------------------------------------------------------------------------------------------- tokens
def test_the_end_of_a_turn_ends_a_text_too(tmp_path: Path) -> None:
    assert opened(tmp_path, tokenizer__ggml__eot_token_id=4).eos_token_ids == (1, 4)


def test_no_end_at_all(tmp_path: Path) -> None:
    assert opened(tmp_path, tokenizer__ggml__eos_token_id=None).eos_token_ids == ()


def test_special_tokens_are_strings(tmp_path: Path) -> None:
    config = opened(
        tmp_path, tokenizer__ggml__add_bos_token=True, tokenizer__ggml__padding_token_id=99
    ).tokenizer_config
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", None)
    assert config["pad_token"] is None  # its id is beyond the tokens
    assert config["add_bos_token"] is True


def test_chat_templates(tmp_path: Path) -> None:
    config = opened(
        tmp_path,
        tokenizer__chat_template="D",
        tokenizer__chat_templates=["tool_use"],
        tokenizer__chat_template__tool_use="T",
    ).tokenizer_config
    assert config["chat_template"] == "D"
    assert config["chat_templates"] == {"default": "D", "tool_use": "T"}


def test_no_chat_template(tmp_path: Path) -> None:
    assert "chat_template" not in opened(tmp_path).tokenizer_config


def test_sampling_defaults(tmp_path: Path) -> None:
    config = opened(tmp_path, general__sampling__temp=0.6, general__sampling__top_k=20).generation_config
    assert (config["temperature"], config["top_k"]) == (0.6, 20)
