"""Token ids to text, one id at a time, by the three ways in which tokenizers spell text.

Invariant: the texts of ``push`` and the one of ``flush`` joined are what
:meth:`asyncllm.frontend.tokenizer.Tokenizer.decode` makes of the ids, at a cost per id that does not depend on how many
came before.
"""

from __future__ import annotations

from codecs import getincrementaldecoder, utf_8_decode
from typing import TYPE_CHECKING, Protocol

from asyncllm.frontend.tokenizer import NO_IDS, DecodeStyle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.frontend.tokenizer import Tokenizer, TokenTable

__all__ = ["Decoder", "make_decoder"]

REPLACEMENT = "\ufffd"
Utf8 = getincrementaldecoder("utf-8")
WINDOW, CONTEXT = 32, 8  # tokens that the general path decodes at most; those it keeps as context


class Decoder(Protocol):
    """Ids to text."""

    @property
    def pending(self) -> object:
        """Return something true while text of pushed ids is still to come."""
        ...

    def push(self, token_id: int) -> str:
        """Return the text that is certain now that ``token_id`` follows."""
        ...

    def flush(self) -> str:
        """Return what is left when no more ids follow; unfinished characters become U+FFFD."""
        ...

    def prime(self, token_ids: Sequence[int]) -> None:
        """Go on after ``token_ids``, whose text was given in full; call before anything is pushed."""
        ...

    def starts_in(self, token_id: int) -> bool:
        """Return whether the text still to come is that of ``token_id``, the last one pushed, and of no earlier id."""
        ...

    def peek(self, token_id: int) -> str:
        """Return the text that ``token_id`` would add here, without pushing it; never ends in U+FFFD."""
        ...


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

    def prime(self, token_ids: Sequence[int]) -> None:
        pass  # between whole characters there is no state

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
    """Tokens are texts, but ``<0xNN>`` is one byte; the front of the whole text may lose its space.

    The library decodes a run of byte tokens as a whole: it is the text that its bytes are, or, if any of them is not
    UTF-8, one U+FFFD per byte. So a run that may still become either is held back to its end; one that is known to be
    bad is not, and each further byte of it costs the same.
    """

    __slots__ = ("_data", "_drop_mark", "_in_run", "_num_strip", "_run", "_table", "_utf8", "pending")

    def __init__(self, table: TokenTable) -> None:
        rules = table.tokenizer.rules
        self._table = table
        self._data = table.data
        self._num_strip = rules.strip_start
        self._drop_mark = rules.replacements[0][0] if rules.drop_first_mark else None
        self._in_run = False  # the last token with a text was a byte
        self._run = bytearray()  # the bytes of this run while they are held
        self._utf8 = Utf8()  # whether they are UTF-8 so far
        self.pending = 0  # how many they are; none of a run that is bad

    def push(self, token_id: int) -> str:
        text = self._table[token_id]
        if text is None:
            text = self._push_byte(self._data[token_id])
        elif self._drop_mark is not None:
            text = self._first(token_id, text)
        elif self._in_run and text:
            text = self._end_run() + text
        return self._strip(text) if self._num_strip and text else text

    def _push_byte(self, byte: bytes) -> str:
        if self._in_run and not self.pending:
            return REPLACEMENT  # of a bad run
        self._in_run = True
        self._run += byte
        self.pending += 1
        try:
            self._utf8.decode(byte)
        except UnicodeDecodeError:
            text = REPLACEMENT * self.pending
            self._forget_run()
            return text
        return ""

    def _end_run(self) -> str:
        """Return the text of the run that is held: its last character may be unfinished, and the run then is bad."""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * self.pending
        self._forget_run()
        self._in_run = False
        return text

    def prime(self, token_ids: Sequence[int]) -> None:
        """Push ids until the front of the text is settled, and then those of the run of bytes at the end."""
        num_pushed = 0
        while num_pushed < len(token_ids) and (self._num_strip or self._drop_mark is not None):
            self.push(token_ids[num_pushed])
            num_pushed += 1
        begin = len(token_ids)
        while begin > num_pushed and not self._table[token_ids[begin - 1]]:  # one without text does not end a run
            begin -= 1
        if begin > num_pushed:
            self._forget_run()
            self._in_run = False
        for token_id in token_ids[begin:]:
            self.push(token_id)
        if self.pending:
            self.flush()

    def _forget_run(self) -> None:
        self._run.clear()
        self._utf8.reset()
        self.pending = 0

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
        return self.pending == len(self._data[token_id])

    def flush(self) -> str:
        text = self._end_run()
        return self._strip(text) if self._num_strip and text else text

    def peek(self, token_id: int) -> str:
        shown = self._table.tokenizer.table(False)
        text = shown[token_id]
        if text is None and self._in_run and not self.pending:
            return ""  # of a bad run
        if text is None:
            unfinished = self._utf8.getstate()[0]
            text = utf_8_decode(unfinished + shown.data[token_id], "replace", False)[0]
        return text.rstrip(REPLACEMENT)


class GeneralDecoder:
    """Any decoder of the library whose text only grows as ids are added: decodes a window with and without the new id.

    The window starts anew at :data:`WINDOW` tokens, with the last :data:`CONTEXT` as context, so it is O(1) per token.
    At the end the whole is decoded once, and what a decoder wrote late (a trailing rule) is added.
    """

    __slots__ = ("_before", "_ids", "_skip", "_skipped", "_start", "_texts", "_tokenizer", "pending")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown_ids: frozenset[int] = NO_IDS) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown_ids if skip_special_tokens else NO_IDS
        self._skip = skip_special_tokens and not shown_ids
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._start = 0
        self._before = ""  # text of the window without the ids whose text is still to come
        self.pending = False

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
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

    def prime(self, token_ids: Sequence[int]) -> None:
        self._ids = [token_id for token_id in token_ids if token_id not in self._skipped]
        self._texts = [self._decode(self._ids)]
        self._start = max(0, len(self._ids) - CONTEXT)
        self._before = self._decode(self._ids[self._start :])

    def starts_in(self, token_id: int) -> bool:
        return False

    def flush(self) -> str:
        self.pending = False
        given = "".join(self._texts)
        whole = self._decode(self._ids)
        return whole[len(given) :] if whole.startswith(given) else ""

    def peek(self, token_id: int) -> str:
        before = self._decode(self._ids[-CONTEXT:])
        after = self._tokenizer.decode([*self._ids[-CONTEXT:], token_id], False)
        text = after[len(before) :] if after.startswith(before) else self._tokenizer.decode([token_id], False)
        return text.rstrip(REPLACEMENT)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)


def make_decoder(tokenizer: Tokenizer, skip_special_tokens: bool, shown_ids: frozenset[int] = NO_IDS) -> Decoder:
    """Return a decoder at the start of a text; ``shown_ids`` are special tokens that are not skipped in any case."""
    if tokenizer.style is DecodeStyle.BYTE_LEVEL:
        return ByteLevelDecoder(tokenizer.table(skip_special_tokens, shown_ids))
    if tokenizer.style is DecodeStyle.BYTE_FALLBACK:
        return ByteFallbackDecoder(tokenizer.table(skip_special_tokens, shown_ids))
    return GeneralDecoder(tokenizer, skip_special_tokens, shown_ids)
