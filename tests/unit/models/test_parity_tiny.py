"""Tiny random models of every shape we register give the logits and the greedy tokens of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncllm.checkpoint import open_checkpoint
from asyncllm.models.base import CausalLM
from asyncllm.models.registry import ARCHITECTURE_TO_CLASS, build_model
from tests.support.flat import FlatDriver

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""On logits of about 1: float32 sums in another order."""

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
SMALL_OPT: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama-tied": ("llama", SMALL | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", SMALL | {"head_dim": 16}),
    "llama-multi-head": ("llama", SMALL | {"num_key_value_heads": 6}),
    "llama-multi-query": ("llama", SMALL | {"num_key_value_heads": 1}),
    "llama-llama3-rope": ("llama", SMALL | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", SMALL | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-linear-rope": (
        "llama",
        SMALL | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-gelu": ("llama", SMALL | {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "mistral": ("mistral", SMALL | {"sliding_window": None}),
    "mistral-window": ("mistral", SMALL | {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("qwen2", SMALL),
    "qwen2-window": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "opt-125m-like": ("opt", SMALL_OPT),
    "opt-350m-like": ("opt", SMALL_OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-untied": ("opt", SMALL_OPT | {"tie_word_embeddings": False}),
    "opt-no-final-norm": ("opt", SMALL_OPT | {"_remove_final_layer_norm": True}),
    "opt-no-biases": ("opt", SMALL_OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt-galactica-like": ("opt", SMALL_OPT | {"activation_function": "gelu"}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    """The same random weights in transformers, and in ours as read from the folder that transformers wrote."""
    model_type, options = VARIANTS[request.param]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **options)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # the default leaves biases at 0, norms at 1 and logits nearly equal
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, build_model(open_checkpoint(str(folder)), torch.float32, CPU)


def prompt(length: int) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def test_logits_equal_transformers(pair: tuple[Any, CausalLM]) -> None:
    reference, model = pair
    token_ids = prompt(41)
    found = FlatDriver(model).step({0: token_ids})[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_logits(reference, token_ids), rtol=0, atol=TOLERANCE)


def test_greedy_tokens_equal_transformers(pair: tuple[Any, CausalLM]) -> None:
    reference, model = pair
    token_ids = prompt(11)
    with torch.inference_mode():
        generated = reference.generate(torch.tensor([token_ids]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert FlatDriver(model).greedy(token_ids, 16) == generated[0, len(token_ids) :].tolist()


def test_chunks_and_neighbours_change_no_bit(pair: tuple[Any, CausalLM]) -> None:
    _, model = pair
    token_ids, other = prompt(30), prompt(17)
    alone = FlatDriver(model).step({0: token_ids})[0]
    driver = FlatDriver(model)
    parts = [
        driver.step({0: token_ids[:7]})[0],
        driver.step({2: other[:5], 0: token_ids[7:8]})[0],
        driver.step({0: token_ids[8:21], 2: other[5:6], 1: other})[0],
        driver.step({1: [3], 0: token_ids[21:]})[0],
    ]
    assert torch.equal(torch.cat(parts), alone)


def test_every_registered_architecture_is_held_against_transformers() -> None:
    tested = {AutoConfig.for_model(kind).model_type for kind, _ in VARIANTS.values()}
    registered = {name.removesuffix("ForCausalLM").lower() for name in ARCHITECTURE_TO_CLASS}
    assert registered == tested
