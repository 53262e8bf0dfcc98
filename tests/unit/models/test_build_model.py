"""Building and loading: what is refused and how it is said, dtypes, names, and that weights are held once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint import ARCHITECTURES, open_checkpoint
from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.layers.linear import TorchLinearMethod
from asyncllm.models.base import CausalLM
from asyncllm.models.registry import build_model, known_architectures
from asyncllm.models.weights import fill
from tests.support.flat import FlatDriver
from tests.support.gguf_files import llama_tensors, write_gguf
from tests.support.models import write_tiny_llama, write_tiny_opt

CPU = torch.device("cpu")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def build(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    return build_model(open_checkpoint(str(folder)), dtype, CPU, **options)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------------------- what it is
def test_the_shape_is_known_after_construction(llama: Path) -> None:
    model = build(llama)
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert model.max_position == 512
    assert model.vocab_size == open_checkpoint(str(llama)).vocab_size
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_positions_can_be_bounded(llama: Path, tmp_path: Path) -> None:
    assert build(llama, max_position=64).max_position == 64
    assert build(llama, max_position=100_000).max_position == 512
    assert build(write_tiny_opt(tmp_path / "opt"), max_position=64).max_position == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_asked_dtype(llama: Path, dtype: torch.dtype) -> None:
    model = build(llama, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    logits = FlatDriver(model).step({0: [1, 2, 3]})[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, FlatDriver(build(llama)).step({0: [1, 2, 3]})[0], rtol=0.1, atol=0.1)


def test_a_tied_head_is_the_embedding(llama: Path) -> None:
    model: Any = build(llama, linear_method=TorchLinearMethod())
    assert model.lm_head.weight is model.embed_tokens.weight


def test_the_plain_linear_method_gives_the_same_numbers(llama: Path) -> None:
    packed, plain = build(llama), build(llama, linear_method=TorchLinearMethod())
    assert "lm_head.weight" in plain.state_dict()
    assert "lm_head.weight" not in packed.state_dict()  # packed and dropped
    found, expected = (FlatDriver(model).step({0: [1, 2, 3]})[0] for model in (packed, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_progress_is_reported(llama: Path) -> None:
    fractions: list[float] = []
    build(llama, report=fractions.append)
    assert fractions == sorted(fractions)
    assert 0.9 < fractions[-1] <= 1.0


# ------------------------------------------------------------------------------------------------------------- names
def test_a_checkpoint_saved_without_its_head_loads(llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    before = FlatDriver(build(llama)).step({0: [5, 6]})[0]
    save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, llama / "model.safetensors")
    assert torch.equal(FlatDriver(build(llama)).step({0: [5, 6]})[0], before)


def test_the_copy_of_a_tied_head_and_old_buffers_are_not_read(llama: Path) -> None:
    before = FlatDriver(build(llama)).step({0: [5, 6]})[0]
    extra = {"lm_head__weight": torch.zeros(3), "model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(8)}
    change_weights(llama, **extra)
    assert torch.equal(FlatDriver(build(llama)).step({0: [5, 6]})[0], before)


def test_old_rope_keys_mean_the_same_as_new_ones(llama: Path) -> None:
    before = FlatDriver(build(llama)).step({0: [5, 6, 7]})[0]
    change_config(llama, rope_parameters=..., rope_theta=10000.0, rope_scaling=None)
    assert torch.equal(FlatDriver(build(llama)).step({0: [5, 6, 7]})[0], before)


# ----------------------------------------------------------------------------------------------------------- refusals
def test_an_unknown_architecture_lists_what_is_known(llama: Path) -> None:
    change_config(llama, architectures=["MambaForCausalLM"])
    with pytest.raises(
        UnsupportedModelError, match=r"'MambaForCausalLM', which is not among .*: Gemma3ForCausalLM, "
    ) as caught:
        build(llama)
    assert caught.value.feature == "MambaForCausalLM"
    assert caught.value.model == str(llama)
    assert known_architectures() == list(ARCHITECTURES), "the caller's process knows the same without torch"


def test_a_quantized_folder_is_refused_by_its_method(llama: Path) -> None:
    change_config(llama, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match="quantized with 'gptq'") as caught:
        build(llama)
    assert caught.value.feature == "gptq"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_act": "xielu"}, "activation 'xielu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rotary scaling 'longrope'"),
    ],
)
def test_an_unsupported_feature_names_itself_and_the_model(llama: Path, changes: dict[str, Any], what: str) -> None:
    change_config(llama, **changes)
    with pytest.raises(UnsupportedModelError, match=what) as caught:
        build(llama)
    assert caught.value.model == str(llama)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": "64"}, r"\$\.hidden_size"),
        ({"num_hidden_layers": 0}, r"\$\.num_hidden_layers"),
        ({"rms_norm_eps": None}, r"\$\.rms_norm_eps"),
        ({"num_attention_heads": 3}, "3 attention heads and 2 key/value heads"),
    ],
)
def test_a_config_that_cannot_be_is_damaged(llama: Path, changes: dict[str, Any], what: str) -> None:
    change_config(llama, **changes)
    with pytest.raises(CheckpointError, match=what) as caught:
        build(llama)
    assert caught.value.file == "config.json"


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"sliding_window": 0}, r"\$\.sliding_window"),
        ({"sliding_window": -1}, r"\$\.sliding_window"),
        ({"sliding_window": 2**40}, r"\$\.sliding_window"),
        ({"max_window_layers": "1"}, r"\$\.max_window_layers"),
        ({"use_sliding_window": "no"}, r"\$\.use_sliding_window"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "3 layer_types for 2 layers"),
        ({"layer_types": 2}, r"\$\.layer_types"),
    ],
)
def test_windows_that_cannot_be_are_damaged(llama: Path, family: str, changes: dict[str, Any], what: str) -> None:
    kind = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    change_config(llama, **{**kind, "use_sliding_window": True, "sliding_window": 8, **changes})
    with pytest.raises(CheckpointError, match=what):
        build(llama)


def test_a_kind_of_layers_that_a_qwen_does_not_have_is_named(llama: Path) -> None:
    kinds = ["full_attention", "chunked_attention"]
    change_config(llama, architectures=["Qwen3ForCausalLM"], model_type="qwen3", layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match="'chunked_attention'"):
        build(llama)


@pytest.mark.parametrize("window", [0, -1, "8", 1.5])
def test_a_window_that_a_mistral_cannot_have_is_damaged(llama: Path, window: object) -> None:
    change_config(llama, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)
    with pytest.raises(CheckpointError, match=r"\$\.sliding_window"):
        build(llama)


def test_opt_heads_must_divide_the_hidden_size(tmp_path: Path) -> None:
    folder = write_tiny_opt(tmp_path)
    change_config(folder, num_attention_heads=5)
    with pytest.raises(CheckpointError, match="hidden_size 64 and 5 attention heads"):
        build(folder)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    change_weights(llama, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'") as caught:
        build(llama)
    assert caught.value.model == str(llama)


def test_an_unknown_tensor_is_named(llama: Path) -> None:
    change_weights(llama, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_norm\.weight' that this architecture"):
        build(llama)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama: Path) -> None:
    change_weights(llama, model__norm__weight=torch.ones(65))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has the shape \(65,\).*makes it \(64,\)"):
        build(llama)


def test_an_untied_model_without_a_head_misses_it(llama: Path) -> None:
    change_config(llama, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'lm_head\.weight'"):
        build(llama)


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    one = torch.ones(2)
    with pytest.raises(CheckpointError, match=r"'model\.x' twice"):
        fill({"model.x": torch.empty(2)}, [("model.x", one), ("x", one)])


def test_a_gguf_lacking_a_tensor_is_damaged(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["blk.0.attn_v.weight"]
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.0\.self_attn\.v_proj\.weight'"):
        build(write_gguf(tmp_path / "m.gguf", tensors=tensors))


def test_a_model_is_built_without_transformers(llama: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; from asyncllm.checkpoint import open_checkpoint; "
        "from asyncllm.models.registry import build_model; "
        f"build_model(open_checkpoint({str(llama)!r}), torch.float32, torch.device('cpu')); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 2**63},
        {"hidden_size": 10**30},
        {"head_dim": 2**63},
        {"max_position_embeddings": 2**63},
        {"rope_parameters": 5},
        {"rope_parameters": ["x"]},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "much"}},
    ],
)
def test_a_configuration_out_of_all_bounds_is_damaged(llama: Path, change: dict[str, Any]) -> None:
    change_config(llama, **change)
    with pytest.raises(CheckpointError):
        build(llama)
