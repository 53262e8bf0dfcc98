"""Token ids of one sample to text, one token at a time, with stop strings.

Two layers. A *decoder* (:mod:`asyncllm.frontend.decoders`) turns ids into text and keeps the bytes of an unfinished
character. A *detokenizer* adds what has to be held back and looks for stop strings; each of its results is
``(text, ids)`` to deliver together.

Invariants:

* The texts joined are what :meth:`asyncllm.frontend.tokenizer.Tokenizer.decode` makes of the ids, and each result's
  text is what its ids added. Prompt ids never come in here, so no text of the prompt can come out; where a prompt ends
  inside a character, the output begins with the rest of it, which becomes U+FFFD as in one-shot decoding.
* A result never has empty text, but for the last one; ids without text yet (an unfinished character, a skipped special
  token) wait for those after them.
* Cost per token does not depend on how many came before.
* Of a stop string nothing is delivered: while the text ends in what may become one, the tokens from its first character
  on are held. The match that *ends* first wins, of those the one that starts first; so the result does not depend on
  how the text is cut into tokens.

States of a token:  pushed ─► held (unfinished character, possible stop string, no text) ─► delivered
                                └─► cut (it is, or follows, a stop string): its id is delivered, its text is not
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from asyncllm.frontend.decoders import Decoder, make_decoder
from asyncllm.frontend.tokenizer import NO_IDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["Detokenizer", "IdsOnly", "StopDetokenizer", "StopStrings", "make_detokenizer"]

Piece = tuple[str, list[int]]
"""Text and the ids that made it, to be delivered together."""


class IdsOnly:
    """``detokenize=False``: every token goes out at once, without text."""

    __slots__ = ()
    matched: str | None = None
    num_held = 0

    def push(self, token_id: int) -> Piece | None:
        """Return the token without text."""
        return "", [token_id]

    def push_silent(self, token_id: int) -> Piece | None:
        """Return the token without text."""
        return "", [token_id]

    def close(self) -> Piece:
        """Return nothing: nothing is held."""
        return "", []

    def peek(self, token_id: int) -> str | None:
        """Return ``None``: no text is wanted."""
        return None


class Detokenizer:
    """Text without stop strings."""

    __slots__ = ("_decoder", "_ids", "_text", "matched")

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []  # held
        self._text = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be pushed after it."""

    @property
    def num_held(self) -> int:
        """Return the number of tokens that are held."""
        return len(self._ids)

    def push(self, token_id: int) -> Piece | None:
        """Take the next token; return what can be delivered now, ``None`` if it has to wait."""
        decoder = self._decoder
        text = decoder.push(token_id)
        ids = self._ids
        if text and not ids and not decoder.pending:
            return text, [token_id]
        ids.append(token_id)
        if text:
            self._text += text
        if not self._text:
            return None
        if not decoder.pending:
            self._ids = []
        elif text and decoder.starts_in(token_id):
            self._ids = [ids.pop()]
        else:
            return None
        piece = self._text, ids
        self._text = ""
        return piece

    def push_silent(self, token_id: int) -> Piece | None:
        """Take a token whose text is not part of the output (the stop token); it goes out with :meth:`close`."""
        self._ids.append(token_id)
        return None

    def close(self) -> Piece:
        """Return all that is held, when no more tokens follow; its text may be empty."""
        piece = self._text + self._decoder.flush(), self._ids
        self._ids, self._text = [], ""
        return piece

    def peek(self, token_id: int) -> str | None:
        """Return the text that ``token_id`` would add here, for logprobs."""
        return self._decoder.peek(token_id)


class StopDetokenizer(Detokenizer):
    """Text up to a stop string. When one is found, :attr:`matched` is set and :meth:`close` returns the rest.

    A match counts only if the token that completes it comes after ``min_tokens`` others.
    """

    __slots__ = ("_include", "_marks", "_min_tokens", "_num_tokens", "_state", "_stops")

    def __init__(self, decoder: Decoder, stops: StopStrings, min_tokens: int, include: bool) -> None:
        super().__init__(decoder)
        self._stops = stops
        self._min_tokens = min_tokens
        self._include = include
        self._num_tokens = 0
        self._state = 0
        self._marks: list[tuple[int, int]] = []  # (held ids, held characters) where the held part may be cut

    def push(self, token_id: int) -> Piece | None:
        """Take the next token; return what can be delivered now, ``None`` if it has to wait or a match is found."""
        self._num_tokens += 1
        text = self._decoder.push(token_id)
        self._ids.append(token_id)
        if text:
            self._text += text
            self._scan(text)
            if self.matched is not None:
                return None
        if not self._decoder.pending:
            self._mark(len(self._ids))
        elif text and self._decoder.starts_in(token_id):
            self._mark(len(self._ids) - 1)
        return self._release() if self._marks else None

    def _mark(self, num_ids: int) -> None:
        num_chars = len(self._text)
        if self._marks and self._marks[-1][1] == num_chars:
            self._marks[-1] = (num_ids, num_chars)
        elif num_chars:
            self._marks.append((num_ids, num_chars))

    def _scan(self, text: str) -> None:
        self._state, end, stop = self._stops.scan(self._state, text, self._num_tokens > self._min_tokens)
        if stop is not None:
            end += len(self._text) - len(text)
            self._text = self._text[: end if self._include else end - len(stop)]
            self.matched = stop

    def _release(self) -> Piece | None:
        """Return the longest run of whole tokens that ends before anything that may become a stop string."""
        num_free = len(self._text) - self._stops.num_held(self._state)
        best = -1
        for index, (_, num_chars) in enumerate(self._marks):
            if num_chars > num_free:
                break
            best = index
        if best < 0:
            return None
        num_ids, num_chars = self._marks[best]
        piece = self._text[:num_chars], self._ids[:num_ids]
        self._text, self._ids = self._text[num_chars:], self._ids[num_ids:]
        self._marks = [(ids - num_ids, chars - num_chars) for ids, chars in self._marks[best + 1 :]]
        return piece

    def close(self) -> Piece:
        """Return all that is held, cut at the match; what was unfinished until now can complete one."""
        if self.matched is None:
            tail = self._decoder.flush()
            self._text += tail
            self._scan(tail)
        piece = self._text, self._ids
        self._ids, self._text, self._marks = [], "", []
        return piece


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces (Aho-Corasick), in O(1) per character.

    A state is a node of the tree of all strings: the longest end of the text so far that is the beginning of one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]
        depths = [0]
        for string in strings:
            node = 0
            for letter in string:
                child = self._children[node].get(letter)
                if child is None:
                    child = len(self._children)
                    self._children[node][letter] = child
                    self._children.append({})
                    self._found.append(None)
                    depths.append(depths[node] + 1)
                node = child
            self._found[node] = string
        self._first_letters = frozenset(self._children[0])
        self._fail = [0] * len(depths)
        self._num_held = depths
        self._link()

    def _link(self) -> None:
        queue = list(self._children[0].values())
        for node in queue:
            fail = self._fail[node]
            if self._found[node] is None:
                self._found[node] = self._found[fail]
            if not self._children[node]:  # a whole string, which no longer one begins with
                self._num_held[node] = self._num_held[fail]
            for letter, child in self._children[node].items():
                self._fail[child] = self._next(fail, letter)
                queue.append(child)

    def _next(self, state: int, letter: str) -> int:
        while True:
            child = self._children[state].get(letter)
            if child is not None:
                return child
            if not state:
                return 0
            state = self._fail[state]

    def scan(self, state: int, text: str, stop_at_match: bool = True) -> tuple[int, int, str | None]:
        """Return the state after ``text``, the end of the first match in it, and its string (``None``: no match)."""
        if not state and self._first_letters.isdisjoint(text):
            return 0, -1, None
        for index, letter in enumerate(text):
            state = self._next(state, letter)
            if stop_at_match and (found := self._found[state]) is not None:
                return state, index + 1, found
        return state, -1, None

    def num_held(self, state: int) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        return self._num_held[state]


@functools.lru_cache(maxsize=128)
def _stop_strings(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    detokenize: bool = True,
    skip_special_tokens: bool = True,
    stop: Sequence[str] = (),
    include_stop_str_in_output: bool = False,
    min_tokens: int = 0,
    shown_ids: frozenset[int] = NO_IDS,
    after: Sequence[int] = (),
) -> Detokenizer | IdsOnly:
    """Return the detokenizer of one sample; ``shown_ids`` are special tokens that are not skipped in any case.

    It goes on after the ids ``after``, whose text was delivered.
    """
    if not detokenize:
        return IdsOnly()
    decoder = make_decoder(tokenizer, skip_special_tokens, shown_ids)
    if after:
        decoder.prime(after)
    if not stop:
        return Detokenizer(decoder)
    return StopDetokenizer(decoder, _stop_strings(tuple(stop)), min_tokens, include_stop_str_in_output)
