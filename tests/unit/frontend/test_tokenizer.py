"""Loading tokenizers, what is added to a prompt, and bounds that need no encoding."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from asyncllm.frontend.tokenizer import DecodeStyle, Tokenizer, load_tokenizer
from asyncllm.testing import BOS, EOS, write_tiny_checkpoint
from tests.support.frontend import FIRST_BYTE_ID, byte_tokenizer, sentencepiece_json, wordpiece_json


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_round_trip(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    text = "naïve café — 東京 🙂\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.vocab_size == 260


def test_special_tokens_in_the_text_are_recognised(tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path).encode("a<|im_end|>") == [97, 259]


def test_bos_is_added_where_the_post_processor_says(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, add_bos=True)
    assert tokenizer.encode("a") == [BOS, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_the_file_wins_over_flags_of_the_configuration_as_in_transformers(
    tmp_path: Path, add_bos: bool, flag: bool
) -> None:
    from transformers import AutoTokenizer

    folder = edit_config(write_tiny_checkpoint(tmp_path, add_bos=add_bos), add_bos_token=flag)
    ids = [BOS, 97] if add_bos else [97]
    assert Tokenizer.from_path(folder).encode("a") == ids
    assert AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == ids


def test_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json.*tokenizer=") as caught:
        Tokenizer.from_checkpoint(open_checkpoint(str(folder)))
    assert caught.value.model == str(folder)


def test_damaged_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_path(folder)


def test_option_tokenizer_replaces_the_models_own(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    other = write_tiny_checkpoint(tmp_path / "other", add_bos=True)
    (other / "config.json").unlink()  # a folder with nothing but a tokenizer
    config = EngineConfig.from_options(str(model), tokenizer=str(other))
    assert load_tokenizer(config, open_checkpoint(str(model))).encode("a") == [BOS, 97]
    assert load_tokenizer(EngineConfig.from_options(str(model)), open_checkpoint(str(model))).encode("a") == [97]
    with pytest.raises(ModelNotFoundError):
        Tokenizer.from_path(tmp_path / "nothing")


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="index 2") as caught:
        byte_tokenizer(tmp_path).encode("ab\ud800")
    assert caught.value.parameter == "prompt"


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert len(Tokenizer.from_path(folder).encode("abcdef")) == 6


def test_styles_and_token_bytes(tmp_path: Path) -> None:
    by_bytes, sentencepiece, wordpiece = (
        byte_tokenizer(tmp_path, ["€", b"\xe2\x82"]),
        Tokenizer(sentencepiece_json(), {}),
        Tokenizer(wordpiece_json(), {}),
    )
    assert [by_bytes.style, sentencepiece.style, wordpiece.style] == list(DecodeStyle)
    assert (by_bytes.token_bytes(260), by_bytes.token_bytes(261)) == ("€".encode(), b"\xe2\x82")
    assert sentencepiece.token_bytes(FIRST_BYTE_ID + 0xE2) == b"\xe2"
    assert sentencepiece.token_bytes(FIRST_BYTE_ID + 256 + 1) == b" a"
    assert wordpiece.token_bytes(3) == b"hello"
    assert by_bytes.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        },
        {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "}, {"type": "Fuse"}],
        },
        None,
    ],
)
def test_decoders_that_are_not_known_by_heart_take_the_general_path(decoder: dict[str, Any] | None) -> None:
    content = json.loads(sentencepiece_json())
    content["decoder"] = decoder
    assert Tokenizer(json.dumps(content).encode(), {}).style is DecodeStyle.GENERAL


def test_r72_fewest_tokens_of_a_text_are_known_without_encoding(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, ["x" * 40])
    assert tokenizer.max_token_chars == 40
    assert tokenizer.min_num_tokens(5_000_000) == 125_000
    assert tokenizer.min_num_tokens(41) == 2
    assert Tokenizer(wordpiece_json(), {}).min_num_tokens(5_000_000) == 1  # [UNK] is as long as you like


def test_long_texts_are_encoded_without_the_gil(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    text = "all work and no play " * 50_000
    assert tokenizer.is_long(text)
    assert not tokenizer.is_long("short")
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0)  # gives the GIL away; with the GIL held by the encoder, a turn or two would be all
    thread.join()
    assert ids == list(text.encode())
    assert num_turns > 20


def test_long_and_short_texts_are_encoded_alike(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, add_bos=True)
    assert tokenizer.encode("é" * 5_000) == [BOS, *("é" * 5_000).encode()]
    assert tokenizer.encode("é" * 5_000, add_special_tokens=False) == list(("é" * 5_000).encode())
    with pytest.raises(InvalidParameterError):
        tokenizer.encode("é" * 5_000 + "\udfff")


@pytest.mark.model
def test_smollm2_ids_equal_transformers(smollm2_gguf: Path, smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    from_gguf, from_folder = Tokenizer.from_path(smollm2_gguf), Tokenizer.from_path(smollm2_folder)
    reference = AutoTokenizer.from_pretrained(smollm2_folder)
    for text in (
        "Hello, world!",
        "def f(x):\n    return x  + 1\n",
        "In 2026, pi is 3.14159.",
        "naïve café — 東京 🙂",
        "  12  34",
        "I'm we'll DON'T",
        "<|im_start|>user\nHi<|im_end|>\n",
    ):
        ids = reference(text)["input_ids"]
        assert from_folder.encode(text) == ids
        assert from_gguf.encode(text) == ids
        assert from_gguf.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"null", b"{}", b'{"model": {"vocab": {"\xa0": 1}}}'])
def test_a_damaged_file_is_a_checkpoint_error(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(content, {}, source="m")


@pytest.mark.parametrize("merges", [["a ä"], [["a", "ä"]]])
def test_merges_that_the_library_dies_of_are_refused(merges: list[Any]) -> None:
    """It cuts the prefix off each second half, here inside a character, and aborts the process."""
    vocab = {"a": 0, "ä": 1, "aä": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "continuing_subword_prefix": "x"}
    with pytest.raises(CheckpointError, match="continuing_subword_prefix"):
        Tokenizer(json.dumps({"model": model}).encode(), {}, source="m")


def test_merges_with_their_prefix_are_taken() -> None:
    vocab = {"a": 0, "##b": 1, "ab": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "##b"]], "continuing_subword_prefix": "##"}
    assert Tokenizer(json.dumps({"model": model}).encode(), {}, source="m").encode("ab") == [2]
