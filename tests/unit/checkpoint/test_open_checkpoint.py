"""Opening a checkpoint: where it is looked for, what it says, and what is said when something is missing or damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.checkpoint.defaults import MODEL_TYPE_TO_DEFAULTS
from asyncllm.errors import CheckpointError, ModelNotFoundError
from tests.support.gguf_files import write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def write_folder(folder: Path, config: dict[str, Any] = CONFIG, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# ------------------------------------------------------------------------------------------------------------ finding
def test_a_folder_is_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path)))
    assert (checkpoint.format, checkpoint.path, checkpoint.source) == ("safetensors", tmp_path, str(tmp_path))
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert (checkpoint.vocab_size, checkpoint.max_position) == (10, 64)


def test_a_gguf_file_is_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf")))
    assert checkpoint.format == "gguf"
    assert checkpoint.gguf is not None


def test_a_folder_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(str(tmp_path)).path == path


def test_config_json_wins_over_a_gguf_beside_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(str(write_folder(tmp_path))).format == "safetensors"


def test_a_folder_with_two_ggufs_names_both(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf.*give the path of one"):
        open_checkpoint(str(tmp_path))


def test_a_folder_without_a_model_misses_config_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf") as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.file == "config.json"


@pytest.mark.parametrize("name", ["/no/such/folder", "./absent", "absent/model.gguf", "a b", "x/y/z"])
def test_a_path_that_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder or file") as caught:
        open_checkpoint(name)
    assert caught.value.model == name


def test_an_empty_name_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="empty"):
        open_checkpoint("")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"neither a \.gguf file nor a model folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


def test_a_weight_file_of_a_folder_points_at_the_folder(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="give its folder"):
        open_checkpoint(str(tmp_path / "model.safetensors"))


# ------------------------------------------------------------------------------------------------- Hugging Face cache
def cached(cache: Path, model_id: str, revision: str = "abc") -> Path:
    return cache / ("models--" + model_id.replace("/", "--")) / "snapshots" / revision


def test_an_id_in_the_cache_is_found_by_its_main_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write_folder(cached(tmp_path, "org/name", "old"))
    new = write_folder(cached(tmp_path, "org/name", "new"))
    refs = new.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("new\n")
    assert open_checkpoint("org/name").path == new


def test_an_id_with_a_single_revision_needs_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = write_folder(cached(tmp_path, "gpt2"))
    assert open_checkpoint("gpt2").path == folder


def test_an_id_that_is_not_cached_says_how_to_fetch_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="hf download org/name") as caught:
        open_checkpoint("org/name")
    assert str(tmp_path) in str(caught.value)
    assert caught.value.model == "org/name"


def test_a_local_folder_wins_over_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    write_folder(cached(tmp_path / "cache", "org/name"))
    write_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").path == Path("org/name")


# -------------------------------------------------------------------------------------------------------- damaged JSON
@pytest.mark.parametrize("content", ["{", "", "[1]", '{"a": }'])
def test_a_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.file == "config.json"


@pytest.mark.parametrize("name", ["generation_config", "tokenizer_config", "special_tokens_map"])
def test_a_damaged_companion_file_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, **{name: "{oops"})
    with pytest.raises(CheckpointError, match=name) as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.file == f"{name}.json"


def test_no_architecture_is_an_error_when_it_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path, {"model_type": "llama"})))
    with pytest.raises(CheckpointError, match="architectures"):
        _ = checkpoint.architecture


@pytest.mark.parametrize("value", ["8", 0, -1, True, None, 2.5])
def test_a_vocabulary_that_is_no_positive_integer_is_an_error(tmp_path: Path, value: Any) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path, CONFIG | {"vocab_size": value})))
    with pytest.raises(CheckpointError, match="vocab_size"):
        _ = checkpoint.vocab_size


def test_no_context_length_is_an_error_when_it_is_asked_for(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path, {"architectures": ["X"]})))
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        _ = checkpoint.max_position


# -------------------------------------------------------------------------------------------------------- end of text
@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, 5, (5,)),
        (2, [5, 6, 5], (5, 6)),
        (None, None, ()),
        (None, 7, (7,)),
        (-1, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    files = {} if generation is None else {"generation_config": {"eos_token_id": generation}}
    assert (
        open_checkpoint(str(write_folder(tmp_path, CONFIG | {"eos_token_id": config}, **files))).eos_token_ids
        == expected
    )


@pytest.mark.parametrize("value", ["2", [1, "x"], 1.5, True])
def test_an_eos_that_is_no_id_is_an_error(tmp_path: Path, value: Any) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path, CONFIG | {"eos_token_id": value})))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        _ = checkpoint.eos_token_ids


def test_bos_id(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_folder(tmp_path))).bos_token_id == 1
    assert open_checkpoint(str(write_folder(tmp_path, CONFIG | {"bos_token_id": None}))).bos_token_id is None


def test_a_multimodal_config_is_read_by_its_text_part(tmp_path: Path) -> None:
    nested = {
        "architectures": ["X"],
        "text_config": {"vocab_size": 77, "max_position_embeddings": 9, "eos_token_id": 4},
    }
    checkpoint = open_checkpoint(str(write_folder(tmp_path, nested)))
    assert (checkpoint.vocab_size, checkpoint.max_position, checkpoint.eos_token_ids) == (77, 9, (4,))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_stored_dtype_is_read_by_its_old_and_new_name(tmp_path: Path, key: str) -> None:
    assert open_checkpoint(str(write_folder(tmp_path, CONFIG | {key: "bfloat16"}))).dtype == "bfloat16"


# ----------------------------------------------------------------------------------------------------------- defaults
@pytest.mark.parametrize("model_type", sorted(MODEL_TYPE_TO_DEFAULTS))
def test_what_a_config_leaves_out_means_what_transformers_takes_it_for(model_type: str) -> None:
    from transformers import AutoConfig

    reference = AutoConfig.for_model(model_type)
    for name, value in MODEL_TYPE_TO_DEFAULTS[model_type].items():
        if model_type in ("qwen2", "qwen3") and name == "sliding_window":
            continue  # the class clears it where use_sliding_window is false
        assert getattr(reference, name) == value, name


def test_an_explicit_null_is_not_a_gap(tmp_path: Path) -> None:
    bare = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert open_checkpoint(str(write_folder(tmp_path, bare))).eos_token_ids == (2,)
    assert open_checkpoint(str(write_folder(tmp_path, bare | {"eos_token_id": None}))).eos_token_ids == ()


# ---------------------------------------------------------------------------------------------------- tokenizer config
def test_special_tokens_are_plain_strings(tmp_path: Path) -> None:
    write_folder(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None},
        special_tokens_map={"unk_token": {"content": "<unk>"}, "eos_token": "other"},
    )
    config = open_checkpoint(str(tmp_path)).tokenizer_config
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["pad_token"] is None


def test_the_template_file_wins_over_the_key(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert open_checkpoint(str(tmp_path)).tokenizer_config["chat_template"] == "new"


def test_the_older_template_file_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template={"chat_template": "from json"})
    assert open_checkpoint(str(tmp_path)).tokenizer_config["chat_template"] == "from json"


def test_of_several_templates_the_default_one_is_the_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config = open_checkpoint(str(write_folder(tmp_path, tokenizer_config={"chat_template": named}))).tokenizer_config
    assert config["chat_template"] == "D"
    assert config["chat_templates"] == {"default": "D", "tool_use": "T"}


def test_additional_template_files_are_found(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer_config={"chat_template": "D"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert open_checkpoint(str(tmp_path)).tokenizer_config["chat_templates"] == {"default": "D", "rag": "R"}


def test_a_folder_without_tokenizer_files_opens(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path)))
    assert checkpoint.tokenizer_config == {}
    assert checkpoint.find("tokenizer.json") is None


def test_a_file_of_the_folder_is_found(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer={})
    assert open_checkpoint(str(tmp_path)).find("tokenizer.json") == tmp_path / "tokenizer.json"


# --------------------------------------------------------------------------------------------------- ids with a token
@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 4}, "merges": ["a b"]}, "added_tokens": []}, 5),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<s>"}]}, 10),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}, 2),
    ],
)
def test_r58_ids_with_a_token_are_counted_from_the_tokenizer(tmp_path: Path, tokenizer: Any, expected: int) -> None:
    assert open_checkpoint(str(write_folder(tmp_path, tokenizer=tokenizer))).num_tokens == expected


def test_r58_ids_with_a_token_are_counted_from_the_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf")))
    assert (checkpoint.num_tokens, checkpoint.vocab_size) == (5, 8)


def test_without_a_tokenizer_the_tokens_are_not_counted(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_folder(tmp_path))).num_tokens is None


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_folder(tmp_path, tokenizer="{oops")))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = checkpoint.num_tokens


# --------------------------------------------------------------------------------------------------------------- cost
def test_opening_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from asyncllm.checkpoint import open_checkpoint; "
        f"open_checkpoint({str(path)!r}).eos_token_ids; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model", ["x" * 5000, "~nosuchuser/model", "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_a_model_that_is_not_there(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(model)
