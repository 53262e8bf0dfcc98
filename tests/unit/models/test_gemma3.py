"""Gemma 3: what a configuration may say, old and new forms of it, and checkpoints that see images too."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.layers.norm import OffsetRMSNorm, RMSNorm
from asyncllm.models.registry import build_model
from tests.support.flat import FlatDriver

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EYE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 448}
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    Gemma3ForCausalLM(Gemma3TextConfig(**TEXT)).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def folder_with_images(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    Gemma3ForConditionalGeneration(Gemma3Config(text_config=TEXT, vision_config=EYE)).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def logits(folder: Path) -> torch.Tensor:
    model = build_model(open_checkpoint(str(folder)), torch.float32, CPU)
    return FlatDriver(model).step({0: TOKENS})[0]


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"layer_types": ["sliding_attention", "chunked_attention", "full_attention"]}, "type 'chunked_attention'"),
    ],
)
def test_what_gemma_3_does_not_have_is_refused_by_name(folder: Path, change: dict[str, Any], what: str) -> None:
    change_config(folder, **change)
    with pytest.raises(UnsupportedModelError, match=what) as caught:
        logits(folder)
    assert caught.value.model == str(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
        ({"sliding_window_pattern": 0}, r"\$\.sliding_window_pattern"),
        ({"sliding_window": 0}, r"\$\.sliding_window"),
        ({"query_pre_attn_scalar": "8"}, r"\$\.query_pre_attn_scalar"),
        ({"query_pre_attn_scalar": 0}, r"\$\.query_pre_attn_scalar"),
    ],
)
def test_a_config_that_cannot_be_is_damaged(folder: Path, change: dict[str, Any], what: str) -> None:
    change_config(folder, **change)
    with pytest.raises(CheckpointError, match=what):
        logits(folder)


# ------------------------------------------------------------------------------------------------ forms of a config
def test_older_keys_mean_the_same_as_new_ones(folder: Path) -> None:
    before = logits(folder)
    change_config(
        folder, rope_parameters=..., rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None, layer_types=...
    )
    change_config(folder, layer_types=..., sliding_window_pattern=2)
    assert torch.equal(logits(folder), before)


def test_older_scaling_stretches_the_full_layers_only(folder: Path) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    change_config(folder, rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}})
    expected = logits(folder)
    change_config(folder, rope_parameters=..., rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert torch.equal(logits(folder), expected)


# --------------------------------------------------------------------------------------------------------- with images
def test_the_language_model_of_one_with_images_is_taken(
    folder_with_images: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Gemma3ForConditionalGeneration.from_pretrained(folder_with_images).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    with caplog.at_level(logging.WARNING, "asyncllm"):
        torch.testing.assert_close(logits(folder_with_images), expected, rtol=0, atol=2e-5)
    assert "takes text only" in caplog.text


@pytest.mark.parametrize("nested", ["language_model.model.", "model.language_model."])
def test_both_orders_of_nesting_are_read(folder_with_images: Path, nested: str) -> None:
    expected = logits(folder_with_images)
    path = folder_with_images / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        inner = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        is_text = inner.startswith(("layers.", "embed_tokens.", "norm."))
        weights[f"{nested}{inner}" if is_text else inner] = tensor
    assert any(name.startswith("vision_tower.") for name in weights)
    save_file(weights, path)
    assert torch.equal(logits(folder_with_images), expected)


def test_what_a_nested_config_leaves_out_is_filled_in(folder_with_images: Path) -> None:
    text = json.loads((folder_with_images / "config.json").read_text())["text_config"]
    expected = logits(folder_with_images)
    for name in ("hidden_activation", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "rope_parameters"):
        text.pop(name, None)
    change_config(folder_with_images, text_config=text)
    assert torch.equal(logits(folder_with_images), expected)


# --------------------------------------------------------------------------------------------------------------- norms
def test_the_weight_of_an_offset_norm_stays_in_float32() -> None:
    """Next to one, bfloat16 has steps of 1/128: the sum would lose what the checkpoint says."""
    norm = OffsetRMSNorm(4, 1e-6, dtype=torch.bfloat16, device=CPU)
    (destination,) = norm.destinations("norm").values()
    assert not isinstance(destination, torch.Tensor)
    destination.take(torch.full((4,), 0.001, dtype=torch.bfloat16))
    assert norm.weight.dtype == torch.float32
    torch.testing.assert_close(norm.weight, torch.full((4,), 1.001), rtol=0, atol=1e-5)
    x = torch.randn(3, 4).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    plain = RMSNorm(4, 1e-6, dtype=torch.float32, device=CPU)
    plain.weight.copy_(norm.weight)
    assert torch.equal(norm(x.float()), plain(x.float()))
