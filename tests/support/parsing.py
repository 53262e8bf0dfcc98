"""What a parser made of a text, in a form that does not depend on how the text was cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncllm.frontend.parsing.spans import OutputParser, Span
from asyncllm.outputs import Channel


@dataclass
class Told:
    """All that was told of one call."""

    name: str | None = None
    arguments: str = ""
    call: tuple[str, dict[str, Any], str] | None = None
    invalid: tuple[str | None, str, str] | None = None


@dataclass
class Parse:
    """Runs of text by channel, and the calls in order."""

    runs: list[tuple[str, str]] = field(default_factory=list)
    calls: list[Told] = field(default_factory=list)

    def text(self, channel: Channel) -> str:
        return "".join(text for name, text in self.runs if name == channel)

    @property
    def content(self) -> str:
        return self.text(Channel.CONTENT)

    @property
    def reasoning(self) -> str:
        return self.text(Channel.REASONING)

    @property
    def arguments(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of the valid calls."""
        return [told.call[:2] for told in self.calls if told.call is not None]

    @property
    def errors(self) -> list[str]:
        return [told.invalid[2] for told in self.calls if told.invalid is not None]


def parse(parser: OutputParser, pieces: Iterable[str]) -> Parse:
    """Feed the pieces one by one, check what holds for every parser, and return what was found."""
    pieces = list(pieces)
    spans: list[Span] = []
    for piece in pieces:
        spans += parser.feed(piece)
        assert all(span.text for span in spans), "a span without text before the end"
    at_end = parser.close()
    assert all(span.text for span in at_end[:-1])
    spans += at_end
    assert "".join(span.text for span in spans) == "".join(pieces)
    return collected(spans)


def collected(spans: Sequence[Span]) -> Parse:
    """Join runs of the same channel, and what was told of the same call."""
    result = Parse()
    ids: dict[int, str] = {}
    for channel, text, delta in spans:
        if text and result.runs and result.runs[-1][0] == channel:
            result.runs[-1] = (channel, result.runs[-1][1] + text)
        elif text:
            result.runs.append((str(channel), text))
        if delta is None:
            continue
        if delta.index == len(result.calls):
            result.calls.append(Told())
        told = result.calls[delta.index]
        assert told.call is None, "something follows the end of a call"
        assert told.invalid is None, "something follows the end of a call"
        assert ids.setdefault(delta.index, delta.id) == delta.id
        if delta.name is not None:
            assert told.name is None
            told.name = delta.name
        if delta.arguments:
            assert told.name is not None, "arguments before the name"
            told.arguments += delta.arguments
        if delta.call is not None:
            assert delta.call.id == delta.id
            assert (delta.call.name, delta.call.text) == (told.name, told.arguments)
            told.call = (delta.call.name, delta.call.arguments, delta.call.text)
        if delta.invalid is not None:
            assert delta.invalid.id == delta.id
            told.invalid = (delta.invalid.name, delta.invalid.text, delta.invalid.error)
    assert all(told.call or told.invalid for told in result.calls), "a call without an end"
    return result
