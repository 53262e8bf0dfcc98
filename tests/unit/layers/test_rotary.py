"""Rotary positions are those of transformers, for each way to stretch them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.kernels.fused import apply_rotary
from asyncllm.layers.rotary import RotaryEmbedding, rope_frequencies, rope_parameters

CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


def reference_config(scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_heads_are_rotated_as_in_transformers(name: str) -> None:
    config = reference_config(SCALINGS[name])
    heads = torch.randn(7, 6, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 2, 130, 131, 400, 511])
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    rotary = RotaryEmbedding(64, 512, rope_parameters(config.to_dict()), dtype=torch.float32, device=CPU)
    torch.testing.assert_close(apply_rotary(heads, rotary(positions)), expected[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers_bit_for_bit(name: str) -> None:
    config = reference_config(SCALINGS[name])
    reference = LlamaRotaryEmbedding(config)
    ours, scale = rope_frequencies(64, rope_parameters(config.to_dict()))
    assert torch.equal(ours, reference.inv_freq)
    assert scale == reference.attention_scaling


def test_factors_of_a_gguf_equal_the_scaling_they_came_from() -> None:
    plain, _ = rope_frequencies(64, {"rope_type": "default", "rope_theta": 50000.0})
    config = rope_parameters(reference_config(SCALINGS["llama3"]).to_dict())
    scaled, _ = rope_frequencies(64, config)
    factors = {"rope_type": "factors", "rope_theta": 50000.0, "factors": (plain / scaled).tolist()}
    torch.testing.assert_close(rope_frequencies(64, factors)[0], scaled, rtol=1e-6, atol=0)


def test_the_input_may_be_a_strided_view_and_is_not_changed() -> None:
    rotary = RotaryEmbedding(8, 16, {"rope_type": "default", "rope_theta": 100.0}, dtype=torch.float32, device=CPU)
    wide = torch.randn(3, 5, 8)
    before = wide.clone()
    view = wide[:, 1:3]
    rotation = rotary(torch.tensor([4, 5, 6]))
    assert torch.equal(apply_rotary(view, rotation), apply_rotary(view.contiguous(), rotation))
    assert torch.equal(wide, before)


def test_a_narrow_dtype_rounds_the_tables_once() -> None:
    parameters = {"rope_type": "default", "rope_theta": 100.0}
    wide = RotaryEmbedding(8, 16, parameters, dtype=torch.float32, device=CPU)
    narrow = RotaryEmbedding(8, 16, parameters, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(wide.table.bfloat16(), narrow.table)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}},
    ],
)
def test_old_and_new_forms_of_a_config_say_the_same(config: dict[str, Any]) -> None:
    found = rope_parameters(config | {"max_position_embeddings": 64}, "full_attention")
    assert (found["rope_type"], found["factor"], found["rope_theta"]) == ("linear", 2.0, 5e5)
    assert found["original_max_position_embeddings"] == 64


def test_a_config_that_is_silent_means_the_plain_base() -> None:
    found = rope_parameters({"rope_scaling": None})
    assert (found["rope_type"], found["rope_theta"]) == ("default", 10000.0)


@pytest.mark.parametrize("kind", ["longrope", "su", "nonsense"])
def test_an_unknown_scaling_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rotary scaling '{kind}'.*known are") as caught:
        rope_frequencies(64, {"rope_type": kind, "rope_theta": 1e4})
    assert caught.value.feature == f"rope_type {kind}"


def test_a_partly_rotated_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="part of each head"):
        rope_frequencies(64, {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "factors"])
def test_a_scaling_without_its_parameters_is_damaged(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rotary scaling '{kind}' lacks"):
        rope_frequencies(64, {"rope_type": kind, "rope_theta": 1e4})


@pytest.mark.parametrize("base", [0, -1.0, "x", math.inf, math.nan, True, [1e4]], ids=str)
def test_a_base_that_cannot_be_is_named(base: object) -> None:
    with pytest.raises(CheckpointError, match="rope_theta is"):
        rope_frequencies(64, {"rope_type": "default", "rope_theta": base})


@pytest.mark.parametrize("factor", [0, -2.0, "x"], ids=str)
def test_a_linear_factor_that_cannot_be_is_damaged(factor: object) -> None:
    with pytest.raises(CheckpointError, match="lacks or misstates"):
        rope_frequencies(64, {"rope_type": "linear", "rope_theta": 1e4, "factor": factor})


def test_factors_for_another_head_dim_are_damaged() -> None:
    with pytest.raises(CheckpointError, match="3 rotary factors for 32"):
        rope_frequencies(64, {"rope_type": "factors", "rope_theta": 1e4, "factors": [1.0, 2.0, 3.0]})
