"""The reasoning that a model writes before its answer, split from the rest.

    start ──marker──> inside ──end marker──> after        a prompt that opened it already begins inside

Reasoning begins at the front of the output or not at all, so that an answer may speak of the markers. Line breaks next
to a marker belong to it; what comes after is the inner parser's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.frontend.parsing.spans import MAX_LEADING, Span, num_held, without_breaks
from asyncllm.outputs import Channel

if TYPE_CHECKING:
    from asyncllm.frontend.parsing.spans import OutputParser

__all__ = ["REASONING_MARKERS", "ReasoningParser"]

REASONING_MARKERS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}
"""By the name that ``reasoning_parser`` takes."""


class ReasoningParser:
    """Spans of reasoning, then those of ``inner``; ``is_open``: the prompt ends inside the reasoning."""

    def __init__(self, markers: tuple[str, str], inner: OutputParser, *, is_open: bool) -> None:
        self._start, self._end = markers
        self._inner = inner
        self._state = "inside" if is_open else "start"
        self._eats_breaks = is_open
        self._text = ""

    def feed(self, text: str) -> list[Span]:
        """Take the next piece of text; return the spans that are certain now."""
        if self._state == "after" and not self._eats_breaks:
            return self._inner.feed(text)
        self._text += text
        spans: list[Span] = []
        while self._step(spans):
            pass
        return spans

    def close(self) -> list[Span]:
        """Return the rest, when no more text follows."""
        if self._state == "inside":
            spans = [Span(Channel.REASONING, self._text)] if self._text else []
        else:
            spans = self._inner.feed(self._text)
        self._text = ""
        return spans + self._inner.close()

    def _step(self, spans: list[Span]) -> bool:
        """Take what is certain from the front of what is held; return whether to look again."""
        if self._state == "start":
            return self._begin(spans)
        if self._eats_breaks:
            self._put(spans, Channel.MARKUP, len(self._text) - len(self._text.lstrip("\n")))
            if not self._text:
                return False
            self._eats_breaks = False
        if self._state == "after":
            spans += self._inner.feed(self._text)
            self._text = ""
            return False
        place = self._text.find(self._end)
        if place < 0:
            self._put(spans, Channel.REASONING, len(self._text) - num_held(self._text, (self._end,)))
            return False
        self._put(spans, Channel.REASONING, without_breaks(self._text[:place]))
        self._put(spans, Channel.MARKUP, self._text.index(self._end) + len(self._end))
        self._state, self._eats_breaks = "after", True
        return True

    def _begin(self, spans: list[Span]) -> bool:
        bare = self._text.lstrip()
        if len(self._text) - len(bare) > MAX_LEADING:
            self._state = "after"
        elif bare.startswith(self._start):
            self._put(spans, Channel.MARKUP, len(self._text) - len(bare) + len(self._start))
            self._state, self._eats_breaks = "inside", True
        elif self._start.startswith(bare):
            return False
        else:
            self._state = "after"
        return True

    def _put(self, spans: list[Span], channel: Channel, num_chars: int) -> None:
        if num_chars:
            spans.append(Span(channel, self._text[:num_chars]))
            self._text = self._text[num_chars:]
