"""Token ids of one sample to text, one token at a time, with stop strings.

Two layers. A *decoder* turns ids into text and keeps the bytes of an unfinished character. A *detokenizer* adds what has to be
held back and looks for stop strings; each of its results is ``(text, ids)`` to deliver together.

Invariants:

* The texts joined are what :meth:`asyncllm.frontend.tokenizer.Tokenizer.decode` makes of the ids, and each result's text is
  what its ids added. Prompt ids never come in here, so no text of the prompt can come out.
* A result never has empty text, but for the last one; ids without text yet (an unfinished character, a skipped special
  token) wait for those after them.
* Cost per token does not depend on how many came before (the decoder of :class:`GeneralDecoder` looks at a bounded window).
* Of a stop string nothing is delivered: while the text ends in what may become one, the tokens from its first character
  on are held. The match that *ends* first wins, of those the one that starts first; so the result does not depend on
  how the text is cut into tokens.

States of a token:  pushed ─► held (unfinished character, possible stop string, no text) ─► delivered
                                └─► cut (it is, or follows, a stop string): its id is delivered, its text is not
"""

from __future__ import annotations

import functools
from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

from asyncllm.frontend.tokenizer import DecodeStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.frontend.tokenizer import Tokenizer, TokenTable

__all__ = ["Detokenizer", "IdsOnly", "StopDetokenizer", "StopStrings", "make_decoder", "make_detokenizer"]

REPLACEMENT = "\ufffd"
WINDOW, CONTEXT = 32, 8  # tokens that the general path decodes at most; those it keeps as context


class Decoder(Protocol):
    """Ids to text. ``pending`` is true while text of pushed ids is still to come."""

    @property
    def pending(self) -> object: ...

    def push(self, token_id: int) -> str:
        """Return the text that is certain now that ``token_id`` follows."""
        ...

    def flush(self) -> str:
        """Return what is left when no more ids follow; unfinished characters become U+FFFD."""
        ...

    def starts_in(self, token_id: int) -> bool:
        """Return whether the text still to come is that of ``token_id``, the last one pushed, and of no earlier id."""
        ...

    def peek(self, token_id: int) -> str:
        """Return the text that ``token_id`` would add here, without pushing it; never ends in U+FFFD."""
        ...


# ------------------------------------------------------------------------------------------------------ decoders
class ByteLevelDecoder:
    """Tokens are pieces of UTF-8: a table look-up, but where a character spans tokens."""

    __slots__ = ("_data", "_table", "pending")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._data = table.data
        self.pending = b""

    def push(self, token_id: int) -> str:
        text = self._table[token_id]
        if not self.pending and text is not None:
            return text
        return self._push_bytes(self._data[token_id])

    def _push_bytes(self, data: bytes) -> str:
        data = self.pending + data
        text, num_used = utf_8_decode(data, "replace", False)
        self.pending = data[num_used:]  # at most three bytes
        return text

    def starts_in(self, token_id: int) -> bool:
        return len(self.pending) == len(self._data[token_id])

    def flush(self) -> str:
        text = utf_8_decode(self.pending, "replace", True)[0]
        self.pending = b""
        return text

    def peek(self, token_id: int) -> str:
        shown = self._table.tokenizer.table(False)
        text = shown[token_id]
        if self.pending or text is None:
            text = utf_8_decode(self.pending + shown.data[token_id], "replace", False)[0]
        return text.rstrip(REPLACEMENT)


class ByteFallbackDecoder:
    """Tokens are texts, but ``<0xNN>`` is one byte; the front of the whole text may lose its space."""

    __slots__ = ("_data", "_drop_mark", "_num_strip", "_table", "pending")

    def __init__(self, table: TokenTable) -> None:
        rules = table.tokenizer.rules
        self._table = table
        self._data = table.data
        self._num_strip = rules.strip_start
        self._drop_mark = rules.replacements[0][0] if rules.drop_first_mark else None
        self.pending = b""

    def push(self, token_id: int) -> str:
        text = self._table[token_id]
        if text is None:
            text, self.pending = _decode_bytes(self.pending + self._data[token_id])
        elif self._drop_mark is not None:
            text = self._first(token_id, text)
        elif self.pending and text:
            text = self.flush() + text
        return self._strip(text) if self._num_strip and text else text

    def _first(self, token_id: int, text: str) -> str:
        token = self._table.tokenizer.token_string(token_id)
        if token is None or self._drop_mark is None or token_id in self._table.skipped:
            return text
        text = token.replace(self._drop_mark, "")
        self._drop_mark = None
        return text

    def _strip(self, text: str) -> str:
        while self._num_strip and text.startswith(" "):
            text = text[1:]
            self._num_strip -= 1
        if text:
            self._num_strip = 0
        return text

    def starts_in(self, token_id: int) -> bool:
        return len(self.pending) == len(self._data[token_id])

    def flush(self) -> str:
        text, rest = _decode_bytes(self.pending)
        self.pending = b""
        return text + REPLACEMENT * len(rest)

    def peek(self, token_id: int) -> str:
        shown = self._table.tokenizer.table(False)
        text = shown[token_id]
        if text is None:
            text = _decode_bytes(self.pending + shown.data[token_id])[0]
        return text.rstrip(REPLACEMENT)


def _decode_bytes(data: bytes) -> tuple[str, bytes]:
    """Return the text at the front of ``data``, one U+FFFD per byte that is none, and the unfinished rest."""
    text = ""
    while True:
        try:
            piece, num_used = utf_8_decode(data, "strict", False)
            return text + piece, data[num_used:]
        except UnicodeDecodeError as error:
            text += data[: error.start].decode("utf-8") + REPLACEMENT * (error.end - error.start)
            data = data[error.end :]


class GeneralDecoder:
    """Any decoder of the library whose text only grows as ids are added: decodes a window with and without the new id.

    The window starts anew at :data:`WINDOW` tokens, with the last :data:`CONTEXT` as context, so it is O(1) per token. At the
    end the whole is decoded once, and what a decoder wrote late (a trailing rule) is added.
    """

    __slots__ = ("_before", "_ids", "_skip", "_start", "_texts", "_tokenizer", "pending")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._start = 0
        self._before = ""  # text of the window without the ids whose text is still to come
        self.pending = False

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""  # kept out of the window, which would be all context and no text after some of them
        self._ids.append(token_id)
        after = self._decode(self._ids[self._start :])
        is_full = len(self._ids) - self._start >= WINDOW
        self.pending = after.endswith(REPLACEMENT) and not is_full
        if self.pending:
            return ""
        text = after[len(self._before) :] if after.startswith(self._before) else ""
        self._before = after
        if is_full:
            self._start = len(self._ids) - CONTEXT
            self._before = self._decode(self._ids[self._start :])
        self._texts.append(text)
        return text

    def starts_in(self, token_id: int) -> bool:
        return False

    def flush(self) -> str:
        self.pending = False
        given = "".join(self._texts)
        whole = self._decode(self._ids)
        return whole[len(given) :] if whole.startswith(given) else ""

    def peek(self, token_id: int) -> str:
        before = self._decode(self._ids[-CONTEXT:])
        after = self._tokenizer.decode_exactly_as_library([*self._ids[-CONTEXT:], token_id], False)
        text = after[len(before) :] if after.startswith(before) else self._tokenizer.decode([token_id], False)
        return text.rstrip(REPLACEMENT)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_exactly_as_library(ids, self._skip)


def make_decoder(tokenizer: Tokenizer, skip_special_tokens: bool) -> Decoder:
    """Return a decoder at the start of a text."""
    if tokenizer.style is DecodeStyle.BYTE_LEVEL:
        return ByteLevelDecoder(tokenizer.table(skip_special_tokens))
    if tokenizer.style is DecodeStyle.BYTE_FALLBACK:
        return ByteFallbackDecoder(tokenizer.table(skip_special_tokens))
    return GeneralDecoder(tokenizer, skip_special_tokens)


# -------------------------------------------------------------------------------------------------- detokenizers
Piece = tuple[str, list[int]]
"""Text and the ids that made it, to be delivered together."""


class IdsOnly:
    """``detokenize=False``: every token goes out at once, without text."""

    __slots__ = ()
    matched: str | None = None

    def push(self, token_id: int) -> Piece | None:
        return "", [token_id]

    def push_silent(self, token_id: int) -> Piece | None:
        return "", [token_id]

    def close(self) -> Piece:
        return "", []

    def peek(self, token_id: int) -> str | None:
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
        """Return the state after ``text``, and where in it the first match ends with the string, ``None`` if none does."""
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
) -> Detokenizer | IdsOnly:
    """Return the detokenizer of one sample."""
    if not detokenize:
        return IdsOnly()
    decoder = make_decoder(tokenizer, skip_special_tokens)
    if not stop:
        return Detokenizer(decoder)
    return StopDetokenizer(decoder, _stop_strings(tuple(stop)), min_tokens, include_stop_str_in_output)
