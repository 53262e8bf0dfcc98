"""The result of a parser, and the search for markers in text that comes in pieces.

Invariant: a marker is found wherever the text is cut, since whatever may become one is held until that is decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from asyncllm.outputs import Channel, ToolCallDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_LEADING", "ContentParser", "OutputParser", "Span", "find_marker", "num_held", "without_breaks"]


class Span(NamedTuple):
    """A run of text in one channel. The text is empty only at the end of the output."""

    channel: Channel
    text: str
    tool_call: ToolCallDelta | None = None


class OutputParser(Protocol):
    """Cuts one sample's text into spans."""

    def feed(self, text: str) -> list[Span]:
        """Take the next piece of text; return the spans that are certain now."""
        ...

    def close(self) -> list[Span]:
        """Return the rest, when no more text follows."""
        ...


class ContentParser:
    """Everything is content."""

    __slots__ = ()

    def feed(self, text: str) -> list[Span]:
        """Return ``text`` as content."""
        return [Span(Channel.CONTENT, text)] if text else []

    def close(self) -> list[Span]:
        """Return nothing: nothing is held."""
        return []


MAX_BREAKS = 2
"""Line breaks in front of a marker that belong to it; more are text, so that a model which writes nothing else is seen
to do so."""
MAX_LEADING = 64
"""White space before what may be a marker or a call; more is content, for the same reason."""


def without_breaks(text: str) -> int:
    """Return the length of ``text``, which a marker follows, without the line breaks that belong to the marker."""
    return max(len(text.rstrip("\n")), len(text) - MAX_BREAKS)


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Return where the first of ``markers`` in ``text`` begins, and which it is; ``(-1, "")`` if there is none."""
    best, found = -1, ""
    for marker in markers:
        place = text.find(marker)
        if place >= 0 and (best < 0 or place < best):
            best, found = place, marker
    return best, found


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``markers``.

    Line breaks in front of a marker belong to it, so they wait as well.
    """
    if not text.endswith("\n") and all(marker[0] not in text for marker in markers):
        return 0
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                longest = max(longest, length)
                break
    return len(text) - without_breaks(text[: len(text) - longest])
