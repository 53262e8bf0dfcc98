"""Tiny random models of every shape we register give the logits and the greedy tokens of transformers.

On torch with blocks of 4 tokens, and on the compiled kernels with blocks of 16; windows lie in a block and across.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncllm.checkpoint import open_checkpoint
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.registry import ARCHITECTURE_TO_CLASS, build_model
from tests.support.flat import FlatDriver
from tests.support.kernels import native_kernels

MakeDriver = Callable[[], FlatDriver]

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
GEMMA3 = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 20,  # neither 48 / 6 nor a multiple of 16
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": None,
    "bos_token_id": None,
}
EYE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 448}
SCALED_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
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
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-pattern": ("gemma3_text", GEMMA3 | {"layer_types": None, "sliding_window_pattern": 3}),
    "gemma3-scaled-rope": ("gemma3_text", GEMMA3 | {"rope_parameters": SCALED_ROPE, "attention_bias": True}),
    "gemma3-untied": ("gemma3_text", GEMMA3 | {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma3-window-across-blocks": ("gemma3_text", GEMMA3 | {"sliding_window": 18, "hidden_activation": "gelu"}),
    "gemma3-with-images": ("gemma3", {"text_config": GEMMA3, "vision_config": EYE}),
    "qwen2": ("qwen2", SMALL),
    "qwen2-window": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-head-dim": ("qwen2", SMALL | {"num_attention_heads": 4}),  # 12
    "qwen3": ("qwen3", SMALL | {"head_dim": 20}),
    "qwen3-biases-window": (
        "qwen3",
        SMALL
        | {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 1,
        },
    ),
    "opt-125m-like": ("opt", SMALL_OPT),
    "opt-350m-like": ("opt", SMALL_OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-untied": ("opt", SMALL_OPT | {"tie_word_embeddings": False}),
    "opt-no-final-norm": ("opt", SMALL_OPT | {"_remove_final_layer_norm": True}),
    "opt-no-biases": ("opt", SMALL_OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt-galactica-like": ("opt", SMALL_OPT | {"activation_function": "gelu"}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Random weights in transformers, and the folder that it wrote."""
    model_type, options = VARIANTS[request.param]
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **options)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # the default leaves biases at 0, norms at 1 and logits nearly equal
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return reference, folder


@pytest.fixture(scope="module", params=["torch", "native"])
def pair(request: pytest.FixtureRequest, checkpoint: tuple[Any, Path]) -> tuple[Any, MakeDriver]:
    """The reference, and what makes a driver of the same model as read from the folder."""
    reference, folder = checkpoint
    kernels = native_kernels() if request.param == "native" else None
    method = NativeLinearMethod(kernels) if kernels is not None else None
    model = build_model(open_checkpoint(str(folder)), torch.float32, CPU, linear_method=method)
    return reference, partial(FlatDriver, model, kernels=kernels)


def prompt(length: int) -> list[int]:
    return torch.randint(0, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([token_ids])).logits[0]


def test_logits_equal_transformers(pair: tuple[Any, MakeDriver]) -> None:
    reference, make_driver = pair
    token_ids = prompt(41)
    found = make_driver().step({0: token_ids})[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_logits(reference, token_ids), rtol=0, atol=TOLERANCE)


def test_greedy_tokens_equal_transformers(pair: tuple[Any, MakeDriver]) -> None:
    reference, make_driver = pair
    token_ids = prompt(11)
    with torch.inference_mode():
        generated = reference.generate(torch.tensor([token_ids]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert make_driver().greedy(token_ids, 16) == generated[0, len(token_ids) :].tolist()


def test_chunks_and_neighbours_change_no_bit(pair: tuple[Any, MakeDriver]) -> None:
    _, make_driver = pair
    token_ids, other = prompt(30), prompt(17)
    alone = make_driver().step({0: token_ids})[0]
    driver = make_driver()
    parts = [
        driver.step({0: token_ids[:7]})[0],
        driver.step({2: other[:5], 0: token_ids[7:8]})[0],
        driver.step({0: token_ids[8:21], 2: other[5:6], 1: other})[0],
        driver.step({1: [3], 0: token_ids[21:]})[0],
    ]
    assert torch.equal(torch.cat(parts), alone)


def test_every_registered_architecture_is_held_against_transformers() -> None:
    tested = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind, _ in VARIANTS.values()}
    assert tested == set(ARCHITECTURE_TO_CLASS)
