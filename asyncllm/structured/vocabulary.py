"""The model's vocabulary in the form that the grammar library wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncllm.errors import UnsupportedModelError
from asyncllm.frontend.tokenizer import DecodeStyle, load_tokenizer
from asyncllm.structured.ending import closing_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLTokenizer

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import EngineConfig
    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["Vocabulary", "load_vocabulary"]

SPECIAL = b"\xff"
"""Before the name of a token that no text spells: this byte begins no UTF-8."""


class Vocabulary(NamedTuple):
    """The vocabulary as the library has it, and the tokens by which an output is brought to its end."""

    library: LLTokenizer
    closing: list[list[int]]


class _Tokens:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], eos_token_id: int, special_token_ids: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.bytes_to_id = {token: token_id for token_id, token in enumerate(tokens) if token}
        self._longest = max(map(len, self.bytes_to_id), default=0)
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.special_token_ids = special_token_ids

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that the grammar forces: those that the model knows it by, where they spell it.

        Some tokenizers write a space before any text; then the longest tokens from the left are taken.
        """
        data = text.encode()
        ids = self._tokenizer.encode(text, False)
        if b"".join(self.tokens[token_id] for token_id in ids) == data:
            return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        known, ids, begin = self.bytes_to_id, list[int](), 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in known), None)
            if end is None:  # a byte that the vocabulary lacks: no token spells this text
                break
            ids.append(known[data[begin:end]])
            begin = end
        return ids


def load_vocabulary(
    config: EngineConfig, checkpoint: Checkpoint, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> Vocabulary:
    """Return the vocabulary of the model; 0.3 s for 49,152 tokens.

    :raises UnsupportedModelError: what a token adds to a text depends on its neighbours; or nothing ends a text.
    :raises ImportError: the library is not installed.
    """
    from llguidance import LLTokenizer

    tokenizer = load_tokenizer(config, checkpoint)
    if tokenizer.style is DecodeStyle.GENERAL:
        raise checkpoint.unsupported(
            "its tokens have no text of their own, so that no grammar can be followed", feature="structured output"
        )
    if not eos_token_ids:
        raise UnsupportedModelError(
            f"{checkpoint.source!r} has no end-of-sequence token, which a structured output needs",
            model=checkpoint.source,
            feature="structured output without an end of sequence",
        )
    special = {*tokenizer.special_ids, *eos_token_ids}
    tokens = [_spelled(tokenizer.token_bytes(token_id), token_id in special) for token_id in range(vocab_size)]
    wrapped = _Tokens(
        tokenizer, tokens, eos_token_ids[0], sorted(token_id for token_id in special if token_id < vocab_size)
    )
    library = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_token_ids))  # pyright: ignore[reportArgumentType]
    return Vocabulary(library, closing_tokens(wrapped.bytes_to_id))


def _spelled(data: bytes, is_special: bool) -> bytes:
    return SPECIAL + data if is_special else data
