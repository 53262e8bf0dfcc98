"""The stream of weights: complete, named as in Hugging Face files, and a typed error for what is missing or damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from asyncllm.checkpoint import open_checkpoint
from asyncllm.checkpoint.gguf import GGUFFile
from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.loader import QuantizedTensor, gguf, iter_weights
from tests.support.gguf_files import LLAMA_METADATA, llama_tensors, write_gguf

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(4), "c": torch.full((5,), 2.0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    return tmp_path


def load(path: Path) -> dict[str, torch.Tensor]:
    weights = iter_weights(open_checkpoint(str(path)))
    return {name: tensor.clone() for name, tensor in weights if isinstance(tensor, torch.Tensor)}


def load_quantized(path: Path) -> dict[str, QuantizedTensor]:
    weights = iter_weights(open_checkpoint(str(path)))
    return {
        name: replace(tensor, blocks=tensor.blocks.clone())
        for name, tensor in weights
        if isinstance(tensor, QuantizedTensor)
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors") -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_shards(folder: Path) -> None:
    first = {name: TENSORS[name] for name in ("a.weight", "b.bias")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file({"c": TENSORS["c"]}, folder / "model-00002-of-00002.safetensors")
    shard = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    write_index(folder, shard | {"c": "model-00002-of-00002.safetensors"})


# -------------------------------------------------------------------------------------------------------- safetensors
def test_a_single_file(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    assert_same(load(folder), TENSORS)


def test_shards_by_their_index(folder: Path) -> None:
    write_shards(folder)
    assert_same(load(folder), TENSORS)


def test_tensors_come_as_they_are_stored(folder: Path) -> None:
    save_file({"x": torch.ones(3, dtype=torch.bfloat16)}, folder / "model.safetensors")
    assert load(folder)["x"].dtype == torch.bfloat16


def test_a_single_file_of_another_name(folder: Path) -> None:
    save_file(TENSORS, folder / "weights.safetensors")
    assert_same(load(folder), TENSORS)


def test_no_weights(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*is missing.*holds no weights") as caught:
        load(folder)
    assert caught.value.file == "model.safetensors"


def test_a_cut_off_file_is_named(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    for cut in (0, 5, 60, len(whole) - 4):
        (folder / "model.safetensors").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors of model .* is damaged"):
            load(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    write_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*is missing"):
        load(folder)


def test_a_tensor_that_its_shard_does_not_hold_is_named(folder: Path) -> None:
    write_shards(folder)
    save_file({"d": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="lacks the tensor 'c'"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"x": 3}, {"x": "../other.safetensors"}, {"x": "/etc/passwd"}])
def test_a_damaged_index_is_refused(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_numbers_that_are_no_plain_floats_are_refused_by_name(folder: Path, dtype: torch.dtype) -> None:
    save_file({"x.weight": torch.ones(3).to(dtype)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'x\.weight' in torch"):
        load(folder)


def test_progress_ends_at_all_of_it(folder: Path) -> None:
    write_shards(folder)
    fractions: list[float] = []
    assert len(list(iter_weights(open_checkpoint(str(folder)), fractions.append))) == 3
    assert fractions == sorted(fractions)
    assert len(fractions) == 3
    assert 0 < fractions[0] < fractions[-1] <= 1


# ------------------------------------------------------------------------------------------------------------ pickled
def test_pickled_weights_are_read_without_running_code(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    assert_same(load(folder), TENSORS)


def test_pickled_shards(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "one.bin")
    torch.save({"b": torch.zeros(2)}, folder / "two.bin")
    write_index(folder, {"a": "one.bin", "b": "two.bin"}, "pytorch_model.bin")
    assert_same(load(folder), {"a": torch.ones(2), "b": torch.zeros(2)})


class Evil:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Evil, "ran", True)


def test_a_pickle_that_would_run_code_is_refused(folder: Path) -> None:
    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*cannot be read"):
        load(folder)
    assert not Evil.ran


def test_a_pickle_that_is_none_is_refused(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle at all")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*cannot be read"):
        load(folder)


# --------------------------------------------------------------------------------------------------------------- GGUF
def test_gguf_tensors_have_their_hugging_face_names(tmp_path: Path) -> None:
    tensors = llama_tensors() | {
        "output.weight": np.ones((8, 32), np.float32),
        "rope_freqs.weight": np.ones(4, np.float32),
    }
    found = load(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    layer = "model.layers.0."
    assert set(found) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        layer + "input_layernorm.weight",
        layer + "self_attn.q_proj.weight",
        layer + "self_attn.k_proj.weight",
        layer + "self_attn.v_proj.weight",
        layer + "self_attn.o_proj.weight",
        layer + "post_attention_layernorm.weight",
        layer + "mlp.gate_proj.weight",
        layer + "mlp.up_proj.weight",
        layer + "mlp.down_proj.weight",
    }
    assert torch.equal(found[layer + "mlp.down_proj.weight"], torch.from_numpy(tensors["blk.0.ffn_down.weight"]))


@pytest.mark.parametrize(("name", "heads"), [("q", 4), ("k", 2)])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_query_and_key_rows_are_put_back_from_rotary_pairs(tmp_path: Path, name: str, heads: int, kind: str) -> None:
    original = llama_tensors()[f"blk.0.attn_{name}.weight"]
    original = original if kind == "weight" else original[:, 0].copy()
    halves = original.reshape(heads, 2, original.shape[0] // heads // 2, *original.shape[1:])
    stored = halves.swapaxes(1, 2).reshape(original.shape)  # what llama.cpp's converter does
    path = write_gguf(tmp_path / "m.gguf", tensors=llama_tensors() | {f"blk.0.attn_{name}.{kind}": stored})
    found = load(path)[f"model.layers.0.self_attn.{name}_proj.{kind}"]
    assert torch.equal(found, torch.from_numpy(original))


def test_quantized_matrices_come_as_their_blocks(tmp_path: Path) -> None:
    name, kind = "blk.0.ffn_up.weight", GGMLQuantizationType.Q8_0
    packed = quantize(llama_tensors()[name], kind)
    path = write_gguf(tmp_path / "m.gguf", tensors=llama_tensors() | {name: packed}, raw_types={name: kind})
    found = load_quantized(path)
    assert list(found) == ["model.layers.0.mlp.up_proj.weight"]
    (up,) = found.values()
    assert (up.type_name, up.shape) == ("Q8_0", (64, 32))
    assert np.array_equal(up.blocks.numpy(), packed)
    numbers = up.dequantize(torch.bfloat16)
    assert torch.equal(numbers, torch.from_numpy(dequantize(packed, kind)).bfloat16())


def test_quantized_rows_are_put_back_from_rotary_pairs(tmp_path: Path) -> None:
    name, kind = "blk.0.attn_q.weight", GGMLQuantizationType.Q4_1
    packed = quantize(llama_tensors()[name], kind)
    path = write_gguf(tmp_path / "m.gguf", tensors=llama_tensors() | {name: packed}, raw_types={name: kind})
    found = load_quantized(path)["model.layers.0.self_attn.q_proj.weight"]
    plain = write_gguf(tmp_path / "p.gguf", tensors=llama_tensors() | {name: dequantize(packed, kind)})
    expected = load(plain)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found.dequantize(torch.float32), expected)


def test_a_quantized_vector_comes_as_numbers(tmp_path: Path) -> None:
    name, kind = "output_norm.weight", GGMLQuantizationType.Q8_0
    packed = quantize(llama_tensors()[name], kind)
    path = write_gguf(tmp_path / "m.gguf", tensors=llama_tensors() | {name: packed}, raw_types={name: kind})
    assert torch.equal(load(path)["model.norm.weight"], torch.from_numpy(dequantize(packed, kind)))


def test_memory_of_the_file_is_let_go_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "RELEASE_BYTES", 1)
    path = write_gguf(tmp_path / "m.gguf")
    calls: list[None] = []
    monkeypatch.setattr(GGUFFile, "release", lambda file: calls.append(None))
    found = load(path)
    assert len(calls) == len(found) + 1


def test_a_tensor_type_that_we_do_not_read_is_refused_by_name(tmp_path: Path) -> None:
    name, kind = "blk.0.ffn_up.weight", GGMLQuantizationType.IQ4_NL
    tensors = llama_tensors() | {name: np.zeros((64, 18), np.uint8)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, raw_types={name: kind})
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' in IQ4_NL") as caught:
        load(path)
    assert caught.value.feature == "GGUF tensor type IQ4_NL"


def test_gguf_progress_ends_at_one(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", LLAMA_METADATA)
    fractions: list[float] = []
    list(iter_weights(open_checkpoint(str(path)), fractions.append))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
