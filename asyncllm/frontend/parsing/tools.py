"""Where tool calls begin and end in a model's output, one parser per format.

* ``hermes`` (Hermes, Qwen 2.5 and 3, SmolLM2): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, or a list.
* ``llama3_json``: the whole output is ``{"name": …, "parameters": {…}}``, several with ``;`` between them, after
  ``<|python_tag|>`` or not.
* ``mistral``: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]name{…}`` with
  ``[CALL_ID]id`` and ``[ARGS]`` before the arguments or not.
* :class:`ForcedCallsParser`: the whole output is JSON, as :func:`asyncllm.frontend.parsing.forced.forced_schema` says.

Only JSON outside of strings ends a call, so a marker inside of an argument is part of the argument.
"""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003
from typing import TYPE_CHECKING, ClassVar

from asyncllm.frontend.parsing.json_calls import ENDED, WHITESPACE, CallReader, CallWriter, ValueScanner
from asyncllm.frontend.parsing.spans import MAX_LEADING, Span, find_marker, num_held, without_breaks
from asyncllm.outputs import Channel

if TYPE_CHECKING:
    from asyncllm.frontend.parsing.spans import OutputParser

MAX_UNDECIDED = 1_000
"""Characters of JSON in which a call has to show what it is."""
JSON_BETWEEN_CALLS = WHITESPACE + "{[,]"

__all__ = ["SPECIAL_MARKERS", "TOOL_PARSERS", "ForcedCallsParser", "HermesParser", "Llama3JsonParser", "MistralParser"]


class _ToolParser:
    """Text is content until :attr:`markers` say otherwise; each state is a method that takes from ``self._text``.

    A state returns whether it used something up: then the next state looks at once; else more text is needed.
    """

    markers: ClassVar[tuple[str, ...]]

    def __init__(self, tool_names: frozenset[str] = frozenset()) -> None:
        self._tool_names = tool_names
        self._writer = CallWriter()
        self._text = ""  # what is held
        self._state: Callable[[], bool] = self._content
        self._eats_breaks = False  # line breaks here belong to the marker before them

    def feed(self, text: str) -> list[Span]:
        """Take the next piece of text; return the spans that are certain now."""
        self._text += text
        while self._text and self._state():
            pass
        return self._writer.take()

    def close(self) -> list[Span]:
        """Return the rest, when no more text follows."""
        self._close()
        return self._writer.take_rest()

    def _close(self) -> None:
        self._put(Channel.CONTENT, len(self._text))

    def _open(self, marker: str) -> None:
        """Begin what follows ``marker``, which has been taken."""
        raise AssertionError(marker)

    def _put(self, channel: Channel, num_chars: int) -> None:
        """Give the first characters of what is held to ``channel``."""
        self._writer.write(channel, self._text[:num_chars])
        self._text = self._text[num_chars:]

    def _content(self) -> bool:
        if self._eats_breaks:
            self._put(Channel.MARKUP, len(self._text) - len(self._text.lstrip("\n")))
            if not self._text:
                return False
            self._eats_breaks = False
        place, marker = find_marker(self._text, self.markers)
        if place < 0:
            self._put(Channel.CONTENT, len(self._text) - num_held(self._text, self.markers))
            return False
        self._put(Channel.CONTENT, without_breaks(self._text[:place]))
        self._put(Channel.MARKUP, self._text.index(marker) + len(marker))
        self._open(marker)
        return True

    def _resume_content(self) -> None:
        self._state, self._eats_breaks = self._content, True


class _Body:
    """JSON of calls between two places that are known; what cannot be a call is kept as one that cannot be read."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._reader = CallReader(writer)
        self._num_before = writer.num_calls
        self._has_junk = False

    @property
    def in_string(self) -> bool:
        return self._reader.in_string

    def push(self, letter: str) -> None:
        reader = self._reader
        if not self._has_junk and (reader.in_call or reader.is_done or letter in JSON_BETWEEN_CALLS):
            reader.push(letter)
            return
        if not self._has_junk:
            self._has_junk = True
            self._writer.begin()
        self._writer.add(letter)

    def end(self, error: str | None = None) -> None:
        if self._has_junk:
            self._writer.end(error or "the call is not valid JSON")
        elif self._reader.in_call:
            self._reader.end(error)
        elif self._writer.num_calls == self._num_before:
            self._writer.begin()
            self._writer.end(error or "the call is empty")


class HermesParser(_ToolParser):
    """``<tool_call>…</tool_call>``."""

    markers = ("<tool_call>",)
    END = "</tool_call>"

    def _open(self, marker: str) -> None:
        self._body = _Body(self._writer)
        self._state = self._call

    def _call(self) -> bool:
        text, body = self._text, self._body
        for index, letter in enumerate(text):
            if letter == "<" and not body.in_string:
                rest = text[index : index + len(self.END)]
                if self.END.startswith(rest):
                    self._text = text[index:]
                    if rest != self.END:
                        return False
                    body.end()
                    self._put(Channel.MARKUP, len(self.END))
                    self._resume_content()
                    return True
            body.push(letter)
        self._text = ""
        return False

    def _close(self) -> None:
        if self._state != self._call:
            super()._close()
            return
        for letter in self._text:
            self._body.push(letter)
        self._body.end(ENDED)


class Llama3JsonParser(_ToolParser):
    """JSON from the first character on, or after ``<|python_tag|>``.

    Text that begins as JSON is held until it is plain whether it is a call: it is once it names a tool of the request,
    or any name and has parameters too; it is content once it has a key that calls do not have.
    """

    markers = ("<|python_tag|>",)

    def __init__(self, tool_names: frozenset[str] = frozenset()) -> None:
        super().__init__(tool_names)
        self._state = self._start
        self._separator = ""
        self._ready: list[Span] = []  # certain, while what follows is not

    def _open(self, marker: str) -> None:
        self._state = self._start

    def _start(self) -> bool:
        """Before what may be a call: white space, and after a call a ``;``."""
        bare = self._text.lstrip(WHITESPACE + self._separator)
        if len(self._text) - len(bare) > MAX_LEADING:
            self._state = self._content
            return True
        if not bare or (bare != self.markers[0] and self.markers[0].startswith(bare)):
            return False
        if bare.startswith(self.markers[0]):
            self._put(Channel.MARKUP, len(self._text) - len(bare) + len(self.markers[0]))
        elif bare.startswith("{"):
            self._num_read = len(self._text) - len(bare)
            if self._separator:  # after a call what is between them is no content in any case
                self._put(Channel.MARKUP, self._num_read)
                self._num_read = 0
            self._ready += self._writer.take()
            self._writer.write(Channel.MARKUP, self._text[: self._num_read])
            self._reader = CallReader(self._writer)
            self._state = self._undecided
        else:
            self._state = self._content
        return True

    def _undecided(self) -> bool:
        text, reader = self._text, self._reader
        while self._num_read < len(text):
            reader.push(text[self._num_read])
            self._num_read += 1
            name = self._writer.name
            if name is not None and (name in self._tool_names or reader.has_arguments):
                self._text = text[self._num_read :]
                self._state = self._call
                return True
            is_too_long = self._num_read > MAX_UNDECIDED and not reader.has_arguments
            if reader.other_key is not None or is_too_long or not reader.in_call:
                self._writer.drop()
                self._state = self._content
                return True
        return False

    def _call(self) -> bool:
        for index, letter in enumerate(self._text):
            self._reader.push(letter)
            if self._reader.is_done:
                self._text = self._text[index + 1 :]
                self._state, self._separator = self._start, ";"
                return True
        self._text = ""
        return False

    def feed(self, text: str) -> list[Span]:
        """Take the next piece of text; return the spans that are certain now."""
        self._text += text
        while self._text and self._state():
            pass
        spans, self._ready = self._ready, []
        return spans if self._state == self._undecided else spans + self._writer.take()

    def _close(self) -> None:
        if self._state == self._call:
            self._reader.end(ENDED)
            return
        if self._state == self._undecided:
            self._writer.drop()
        is_between = self._state == self._start and self._separator
        self._put(Channel.MARKUP if is_between else Channel.CONTENT, len(self._text))


class MistralParser(_ToolParser):
    """``[TOOL_CALLS]`` and a list, or a name and its arguments."""

    markers = ("[TOOL_CALLS]",)
    NAME_ENDS = ("{", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]")

    def _open(self, marker: str) -> None:
        self._state = self._form

    def _form(self) -> bool:
        """Directly after the marker: which of the two forms it is."""
        self._put(Channel.MARKUP, len(self._text) - len(self._text.lstrip(WHITESPACE)))
        if not self._text:
            return False
        if self._text[0] in "[{":
            self._reader = CallReader(self._writer)
            self._state = self._list
        else:
            self._writer.begin()
            self._name, self._call_id, self._in_id = "", "", False
            self._state = self._head
        return True

    def _list(self) -> bool:
        reader = self._reader
        for index, letter in enumerate(self._text):
            if letter == "[" and not reader.in_string and self._stops_at(index):
                return self._ends_at(index, reader.end)
            reader.push(letter)
            if reader.is_done:
                self._text = self._text[index + 1 :]
                self._resume_content()
                return True
        self._text = ""
        return False

    def _head(self) -> bool:
        """Read the name, and the id after ``[CALL_ID]``, up to the arguments."""
        place, end = find_marker(self._text, self.NAME_ENDS)
        if place < 0:
            self._take_head(len(self._text) - num_held(self._text, self.NAME_ENDS))
            return False
        self._take_head(place)
        if end == self.markers[0]:
            self._writer.end("the call has no arguments")
            self._resume_content()
            return True
        if end == "{":
            self._scanner = ValueScanner()
            self._writer.tell_name(self._name.strip(), self._call_id.strip())
            self._state = self._arguments
            return True
        self._in_id = end == "[CALL_ID]"
        self._writer.add(end)
        self._text = self._text[len(end) :]
        return True

    def _take_head(self, num_chars: int) -> None:
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        if text:
            self._writer.add(text)
        if self._in_id:
            self._call_id += text
        else:
            self._name += text

    def _arguments(self) -> bool:
        scanner = self._scanner
        for index, letter in enumerate(self._text):
            if letter == "[" and not scanner.in_string and self._stops_at(index):
                return self._ends_at(index, self._end_arguments)
            self._writer.add_argument(letter)
            if scanner.push(letter):
                self._text = self._text[index + 1 :]
                self._end_arguments()
                self._resume_content()
                return True
        self._text = ""
        return False

    def _end_arguments(self, error: str | None = None) -> None:
        self._writer.end(error, whole=False)

    def _stops_at(self, index: int) -> bool:
        """Return whether the marker is at ``index``, or may be: then more text is needed."""
        return self.markers[0].startswith(self._text[index : index + len(self.markers[0])])

    def _ends_at(self, index: int, end: Callable[[], None]) -> bool:
        self._text = self._text[index:]
        if not self._text.startswith(self.markers[0]):
            return False
        end()
        self._resume_content()
        return True

    def _close(self) -> None:
        if self._state == self._list:
            for letter in self._text:
                self._reader.push(letter)
            self._reader.end(ENDED)
        elif self._state == self._head:
            self._take_head(len(self._text))
            self._writer.end(ENDED)
        elif self._state == self._arguments:
            self._writer.add_argument(self._text)
            self._end_arguments(ENDED)
        else:
            super()._close()


class ForcedCallsParser:
    """The whole output is JSON: a list of calls, or with ``name`` the arguments of the one call."""

    def __init__(self, name: str | None = None) -> None:
        self._writer = CallWriter()
        self._body = _Body(self._writer) if name is None else None
        self._scanner: ValueScanner | None = None
        if name is not None:
            self._scanner = ValueScanner()
            self._writer.begin()
            self._writer.tell_name(name)

    def feed(self, text: str) -> list[Span]:
        """Take the next piece of text; return what it adds to the calls."""
        for letter in text:
            if self._body is not None:
                self._body.push(letter)
            elif self._scanner is None:
                self._writer.write(Channel.MARKUP, letter)
            else:
                self._writer.add_argument(letter)
                if self._scanner.push(letter):
                    self._scanner = None
                    self._writer.end(whole=False)
        return self._writer.take()

    def close(self) -> list[Span]:
        """Return the rest; a call that is not complete is invalid."""
        if self._body is not None:
            self._body.end(ENDED)
        elif self._scanner is not None:
            self._writer.end(ENDED, whole=False)
        return self._writer.take_rest()


TOOL_PARSERS: dict[str, Callable[[frozenset[str]], OutputParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""By the name that ``tool_parser`` takes; made with the names of the request's tools."""
SPECIAL_MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": (*HermesParser.markers, HermesParser.END),
    "llama3_json": Llama3JsonParser.markers,
    "mistral": MistralParser.NAME_ENDS[1:],
}
"""What each of them looks for, and a tokenizer may have as a special token."""
