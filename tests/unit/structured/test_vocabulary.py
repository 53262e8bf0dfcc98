"""The vocabulary as the grammar library gets it: tokens by what they add to a text, special ones by no text at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher

from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import UnsupportedModelError
from asyncllm.structured.vocabulary import load_vocabulary
from asyncllm.testing.tiny_checkpoint import EOS
from tests.support.engines import scripted_config
from tests.support.frontend import sentencepiece_json


def test_special_tokens_spell_nothing(tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    checkpoint = open_checkpoint(config.model.model)
    found = load_vocabulary(config, checkpoint, vocab_size=300, eos_token_ids=[EOS]).library
    matcher = LLMatcher(found, LLMatcher.grammar_from_regex(r"(.|\n)*"))
    mask = matcher.compute_bitmask()
    allowed = [token for token in range(300) if mask[token >> 3] >> (token & 7) & 1]
    assert [token for token in allowed if token >= 256] == [EOS]  # neither the other special ones nor the padding


def test_a_text_that_a_grammar_forces_is_spelled_without_the_space_that_a_tokenizer_adds(tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    (Path(config.model.model) / "tokenizer.json").write_bytes(sentencepiece_json())
    checkpoint = open_checkpoint(config.model.model)
    found = load_vocabulary(config, checkpoint, vocab_size=270, eos_token_ids=[2]).library
    matcher = LLMatcher(found, LLMatcher.grammar_from_regex("the"))
    ids = found.tokenize_str("the")
    assert matcher.consume_tokens(ids), matcher.get_error()
    assert matcher.is_accepting()


def test_a_model_without_an_end_of_sequence_is_refused(tmp_path: Path) -> None:
    config = scripted_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no end-of-sequence token"):
        load_vocabulary(config, open_checkpoint(config.model.model), vocab_size=260, eos_token_ids=[])
