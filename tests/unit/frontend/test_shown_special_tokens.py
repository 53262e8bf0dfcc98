"""Special tokens that are markers of a parser stay in the text, and only those, with every kind of tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.frontend.decoders import make_decoder
from asyncllm.frontend.parsing.select import shown_ids
from asyncllm.frontend.tokenizer import Tokenizer
from tests.support.frontend import byte_tokenizer, sentencepiece_json, wordpiece_json


def text(tokenizer: Tokenizer, ids: list[int], shown: frozenset[int]) -> str:
    decoder = make_decoder(tokenizer, True, shown)
    return "".join([*map(decoder.push, ids), decoder.flush()])


@pytest.mark.parametrize(
    ("kind", "ids", "marker", "plain", "with_marker"),
    [
        ("bytes", [97, 258, 259, 98], "<|im_start|>", "ab", "a<|im_start|>b"),
        ("sentencepiece", [260, 2, 1, 262], "</s>", "ab", "a</s>b"),
        ("wordpiece", [3, 2, 1, 4], "[SEP]", "hello world", "hello [SEP] world"),
    ],
)
def test_only_the_markers_are_shown(
    tmp_path: Path, kind: str, ids: list[int], marker: str, plain: str, with_marker: str
) -> None:
    tokenizer = {
        "bytes": lambda: byte_tokenizer(tmp_path),
        "sentencepiece": lambda: Tokenizer(sentencepiece_json(), {}),
        "wordpiece": lambda: Tokenizer(wordpiece_json(), {}),
    }[kind]()
    assert text(tokenizer, ids, frozenset()) == plain
    shown = shown_ids([marker, "<tool_call>"], tokenizer)
    assert len(shown) == 1
    assert text(tokenizer, ids, shown) == with_marker
    assert text(tokenizer, ids, frozenset()) == plain  # the tables are kept apart
