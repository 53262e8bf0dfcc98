"""Tokenizers made from GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.frontend.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_json
from asyncllm.frontend.tokenizer import BYTE_LETTERS, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def byte_level(pre: str | None = "gpt-2", merges: tuple[str, ...] = ("h i",), **changes: Any) -> dict[str, Any]:
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*BYTE_LETTERS, *merged, "<bos>", "<eos>", "<think>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (256 + len(merged)) + [CONTROL, CONTROL, USER],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 256 + len(merged),
        "tokenizer.ggml.eos_token_id": 257 + len(merged),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    pieces = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hello", "llo", "▁hel", "ello"]
    scores = [-1.0, -2.0, -3.0, -4.0, -5.0, -10.0, -11.0, -12.0, -20.0, -13.0, -14.0, -15.0]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER],
        "tokenizer.ggml.scores": [0.0] * 259 + scores + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_json(metadata, "test.gguf"), {})


def words(pre: str, text: str) -> list[str]:
    """Return how ``text`` is split before merging, in plain letters."""
    import tokenizers

    content = json.loads(tokenizer_json(byte_level(pre), "test.gguf"))
    splitter = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer
    assert splitter is not None
    letters = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
    found = splitter.pre_tokenize_str(text)
    return [bytes(letters[letter] for letter in word).decode() for word, _ in found]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a  1234 I'm", ["a", " ", " 1234", " I", "'m"]),
        ("smollm", "a  1234 I'm", ["a", "  ", "1", "2", "3", "4", " I", "'m"]),
        ("llama-bpe", "a  1234 I'M\n\n x", ["a", " ", " ", "123", "4", " I", "'M", "\n\n", " x"]),
        ("qwen2", "a  1234 I'M", ["a", " ", " ", "1", "2", "3", "4", " I", "'M"]),
        ("default", "a  1234, I'm", ["a", " ", " ", "123", "4", ",", " I", "'", "m"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("deepseek-v3", "東京 12345", ["東京", " ", "123", "45"]),
    ],
)
def test_words_are_split_as_the_name_says(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_split_loses_nothing(pre: str) -> None:
    text = "Hello  World's 12345, çà\n\n\tвот 東京! x_y --> $5 <= `z`"
    tokenizer = build(byte_level(pre))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("pre", ["some-new-model", None])
def test_unknown_split_is_refused_with_a_remedy(pre: str | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre.*`tokenizer=`") as caught:
        build(byte_level(pre))
    assert caught.value.model == "test.gguf"


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'t5'"):
        build({**byte_level(), "tokenizer.ggml.model": "t5"})


def test_merges_and_added_tokens() -> None:
    tokenizer = build(byte_level())
    assert tokenizer.encode("hi<think>") == [256, 259]
    assert tokenizer.special_ids == {257, 258}


@pytest.mark.parametrize(
    ("pre", "flags", "ids"),
    [
        ("gpt-2", {}, [256]),
        ("gpt-2", {"add_bos_token": True}, [257, 256]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [257, 256, 258]),
        ("llama-bpe", {}, [257, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre: str, flags: dict[str, bool], ids: list[int]) -> None:
    assert build(byte_level(pre, **flags)).encode("hi") == ids


def test_whole_words_win_over_merges_where_the_split_says_so() -> None:
    metadata = byte_level("llama-bpe", merges=("h i",))
    metadata["tokenizer.ggml.tokens"][-1] = "hi!!"
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    metadata["tokenizer.ggml.tokens"][250] = "hij"  # in the vocabulary, but no merge makes it
    assert build(metadata).encode("hij", add_special_tokens=False) == [250]


@pytest.mark.parametrize(
    ("better", "expected"), [("el", ["<s>", "▁h", "el", "lo"]), ("llo", ["<s>", "▁h", "e", "llo"])]
)
def test_sentencepiece_merges_follow_the_scores(better: str, expected: list[str]) -> None:
    metadata = sentencepiece()
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    for unwanted in ("▁hello", "▁hel", "ello"):
        tokens[tokens.index(unwanted)] = f"<{unwanted}>"
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    if better == "llo":  # before "el" may take the e, and "lo" the o
        scores[tokens.index("el")], scores[tokens.index("llo")], scores[tokens.index("lo")] = -99.0, -11.0, -10.5
    tokenizer = build(metadata)
    assert [tokenizer.token_string(token_id) for token_id in tokenizer.encode("hello")] == expected


def test_sentencepiece_bytes_and_spaces() -> None:
    tokenizer = build(sentencepiece())
    ids = tokenizer.encode("h é", add_special_tokens=False)
    assert [tokenizer.token_string(token_id) for token_id in ids] == ["▁h", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "h é"


def test_sentencepiece_prefix_space_follows_each_special_token_as_in_llama_cpp() -> None:
    tokenizer = build(sentencepiece())
    spelled = [tokenizer.token_string(token_id) for token_id in tokenizer.encode("h<turn>h")]
    assert spelled == ["<s>", "▁h", "<turn>", "▁h"]


def test_sentencepiece_without_prefix_space() -> None:
    tokenizer = build(sentencepiece(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("h h")
    assert [tokenizer.token_string(token_id) for token_id in ids] == ["h", "▁h"]
    assert tokenizer.decode(ids) == "h h"


def test_user_defined_runs_of_spaces_are_matched_before_merging() -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokens[-3:-1] = ["  ", "   "]
    metadata["tokenizer.ggml.token_type"][-3:-1] = [USER, USER]
    tokenizer = build(metadata)
    assert tokenizer.vocab_size == len(tokens)
    ids = tokenizer.encode("h   h  h h")
    assert [tokens[token_id] for token_id in ids] == ["h", "   ", "h", "  ", "h", "▁h"]
    assert tokenizer.decode(ids) == "h   h  h h"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"token_type": [1]},
        {"scores": [0.0]},
        {"scores": None},
    ],
)
def test_lists_that_do_not_fit_are_a_checkpoint_error(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        build(sentencepiece(**change))


def test_a_token_listed_twice_is_a_checkpoint_error() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(CheckpointError, match="twice"):
        build(metadata)
