"""``spaces_between_special_tokens`` has no effect on a ``tokenizer.json``: neither in transformers nor here."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.testing import BOS, EOS, IM_END, write_tiny_checkpoint
from tests.support.frontend import FIRST_PIECE_ID, FrontEnd, sentencepiece_json, wordpiece_json

BYTE_LEVEL = [97, IM_END, EOS, 98, BOS, IM_END, 32, 99]
SENTENCEPIECE = [FIRST_PIECE_ID + 5, 1, 2, FIRST_PIECE_ID + 1, 2, FIRST_PIECE_ID + 3]
WORDPIECE = [3, 1, 2, 4, 5, 2, 7]


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, tuple[bytes, list[int]]]:
    byte_level = (write_tiny_checkpoint(tmp_path) / "tokenizer.json").read_bytes()
    return {
        "byte-level": (byte_level, BYTE_LEVEL),
        "byte-fallback": (sentencepiece_json(), SENTENCEPIECE),
        "general": (wordpiece_json(), WORDPIECE),
    }


@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "general"])
def test_transformers_decodes_alike_with_and_without_it(
    kind: str, skip_special_tokens: bool, contents: dict[str, tuple[bytes, list[int]]]
) -> None:
    from transformers import PreTrainedTokenizerFast

    content, ids = contents[kind]
    peer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_buffer(content), clean_up_tokenization_spaces=False
    )
    texts = {
        peer.decode(ids, skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=spaces)
        for spaces in (False, True)
    }
    assert texts == {Tokenizer(content, {}).decode(ids, skip_special_tokens)}


@pytest.mark.parametrize("spaces", [False, True])
def test_a_stream_is_the_same_with_and_without_it(tmp_path: Path, spaces: bool) -> None:
    front = FrontEnd(tmp_path)
    request, sink = front.open(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    front.finish(request, *BYTE_LEVEL)
    assert sink.text == front.tokenizer.decode(BYTE_LEVEL, skip_special_tokens=False)
