"""The tiny checkpoint: bytes are ids, pieces follow, and the front end can work with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.testing import BOS, EOS, IM_END, IM_START, TINY_VOCAB_SIZE, scripted_llm, write_tiny_checkpoint


def test_the_id_of_a_byte_is_the_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(str(write_tiny_checkpoint(tmp_path))))
    text = "Hello, wörld 👋\n\x00"
    assert tokenizer.encode(text, add_special_tokens=True) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_start|>b<|im_end|>") == [97, IM_START, 98, IM_END]


def test_pieces_are_emitted_but_never_encoded_to(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, pieces=["DEF", b"\xf0\x9f"], add_bos=True)
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(str(path)))
    assert tokenizer.decode([TINY_VOCAB_SIZE, *b"G", TINY_VOCAB_SIZE + 1, 0x91, 0x8B]) == "DEFG👋"
    assert tokenizer.encode("DEF", add_special_tokens=True) == [BOS, *b"DEF"]


def test_the_vocabulary_can_be_padded(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_checkpoint(tmp_path, vocab_size=320, max_position=99)))
    assert (checkpoint.vocab_size, checkpoint.max_position) == (320, 99)
    assert checkpoint.eos_token_ids == (EOS, IM_END)


@pytest.mark.anyio
async def test_an_application_is_tested_in_three_lines() -> None:
    async with scripted_llm({"capital of France": "Paris."}) as llm:
        assert str(await llm.generate("What is the capital of France?")) == "Paris."
        answer = await llm.chat([{"role": "user", "content": "the capital of France?"}]).completion()
    assert answer.text == "Paris."
    assert answer.prompt_token_ids[0] == IM_START
