"""Tool calls written as JSON, read character by character: the name first, then the arguments as they come.

Here: :class:`CallWriter`, which makes spans of one sample's calls and numbers them, and two readers on it:
:class:`CallReader` for ``{"name": …, "arguments": …}`` (or a list of such), :class:`ValueScanner` for one JSON value.
Not here: where calls begin and end in a model's output (:mod:`asyncllm.frontend.parsing.tools`).

Reading is lenient while it streams (only strings and brackets count) and exact at the end: a call is valid if its JSON
is, a missing last brace apart. Line breaks inside strings are let through, since models write them.
"""

from __future__ import annotations

import json
import secrets
import string
from typing import Any, cast

from asyncllm.frontend.parsing.spans import Span
from asyncllm.outputs import Channel, InvalidToolCall, ToolCall, ToolCallDelta

__all__ = ["CallReader", "CallWriter", "ValueScanner"]

WHITESPACE = " \t\r\n"
ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "function")
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""What Mistral's templates insist on; others take any text."""
ENDED = "the output ended before the call was complete"


class CallWriter:
    """The calls of one sample as spans. Text is added piece by piece; a span ends where something is to be told."""

    __slots__ = ("_arguments", "_id", "_is_argument", "_late", "_num_taken", "_pending", "_run", "_run_channel",
                 "_spans", "_tells", "_text", "name", "num_calls")  # fmt: skip

    def __init__(self) -> None:
        self.num_calls = 0
        self._num_taken = 0  # calls that ended before the last take()
        self.name: str | None = None
        self._id = ""
        self._text: list[str] = []  # of the call that is open
        self._arguments: list[str] = []
        self._pending: list[str] = []  # arguments that came before the name
        self._run: list[str] = []  # text of the span that is being written
        self._run_channel: Channel = Channel.MARKUP
        self._is_argument = False
        self._tells: ToolCallDelta | None = None  # what that span tells
        self._late: ToolCallDelta | None = None  # what the next one tells, since the text it came with has gone out
        self._spans: list[Span] = []

    def take(self) -> list[Span]:
        """Return the spans since the last time."""
        self._flush()
        spans, self._spans = self._spans, []
        self._num_taken = self.num_calls
        return spans

    def take_rest(self) -> list[Span]:
        """Return the spans since the last time, when nothing follows; the last one may have no text."""
        spans = self.take()
        if self._late is not None:
            spans.append(Span(Channel.TOOL_CALL, "", self._late))
            self._late = None
        return spans

    def drop(self) -> None:
        """Forget the spans since the last time: they were no call."""
        self._run, self._spans, self._tells, self._late = [], [], None, None
        self.num_calls = self._num_taken

    def _tell(self, delta: ToolCallDelta) -> None:
        """Have the span that is being written tell ``delta`` and end there; the next one, where none is."""
        if self._run:
            self._tells = _joined(self._tells, delta)
            self._flush()
        else:
            self._late = _joined(self._late, delta)

    def _flush(self) -> None:
        """End the span that is being written."""
        if not self._run:
            return
        text = "".join(self._run)
        if self._is_argument:
            if self.name is None:
                self._pending.append(text)
            else:
                self._tells = _joined(self._tells, ToolCallDelta(self.num_calls, self._id, arguments=text))
        self._spans.append(Span(self._run_channel, text, self._tells))
        self._run, self._tells = [], None

    def _write(self, channel: Channel, text: str, is_argument: bool) -> None:
        if channel is not self._run_channel or is_argument is not self._is_argument:
            self._flush()
            self._run_channel, self._is_argument = channel, is_argument
        if not self._run:
            self._tells, self._late = self._late, None
        self._run.append(text)

    def write(self, channel: Channel, text: str) -> None:
        """Add text that belongs to no call."""
        if text:
            self._write(channel, text, False)

    def begin(self) -> None:
        """Begin a call; the text before it is over."""
        self._flush()
        self._id = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        self.name = None
        self._text, self._arguments, self._pending = [], [], []

    def add(self, text: str) -> None:
        """Add text of the call that is none of its arguments."""
        self._text.append(text)
        self._write(Channel.TOOL_CALL, text, False)

    def add_argument(self, text: str) -> None:
        """Add text of the arguments."""
        self._text.append(text)
        self._arguments.append(text)
        self._write(Channel.TOOL_CALL, text, True)

    def tell_name(self, name: str, call_id: str = "") -> None:
        """Say what is called; arguments that came before are told with it."""
        self._id = call_id or self._id
        self._tell(ToolCallDelta(self.num_calls, self._id, name, "".join(self._pending)))
        self.name = name

    def end(self, error: str | None = None, *, closing: str = "", whole: bool = True) -> None:
        """End the call. It is invalid with an ``error``, if its arguments are, or (``whole``) if its text is no JSON.

        ``closing`` is what may be missing at the end of its text.
        """
        text = "".join(self._text)
        if error is None and whole:
            error = self._whole_error(text, closing)
        arguments = self._parsed_arguments() if error is None else None
        delta = ToolCallDelta(self.num_calls, self._id)
        if isinstance(arguments, dict) and self.name:
            delta.call = ToolCall(self._id, self.name, arguments, "".join(self._arguments))
        else:
            error = error or ("the call has no name" if not self.name else cast("str", arguments))
            delta.invalid = InvalidToolCall(self._id, self.name, text, error)
        if self._run_channel is not Channel.TOOL_CALL:
            self._flush()
        self._tell(delta)
        self.num_calls += 1

    def _whole_error(self, text: str, closing: str) -> str | None:
        try:
            _loads(text)
        except ValueError as error:
            try:
                _loads(text + closing)
            except ValueError:
                return f"the call is not valid JSON: {error}"
        return None

    def _parsed_arguments(self) -> dict[str, Any] | str:
        """Return the arguments, or what is wrong with them."""
        text = "".join(self._arguments)
        try:
            value: Any = _loads(text) if text.strip() else {}
            if isinstance(value, str):  # JSON inside a JSON string
                value = _loads(value) if value.strip() else {}
        except ValueError as error:
            return f"the arguments are not valid JSON: {error}"
        if value is None:
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else "the arguments are no JSON object"


def _joined(first: ToolCallDelta | None, second: ToolCallDelta) -> ToolCallDelta:
    """Return what both tell of one call."""
    if first is None:
        return second
    first.name = first.name or second.name
    first.arguments += second.arguments
    first.call, first.invalid = second.call or first.call, second.invalid or first.invalid
    return first


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


class ValueScanner:
    """Finds the end of one JSON object, list or string."""

    __slots__ = ("_depth", "_escaped", "in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self.in_string = False

    @property
    def is_inside(self) -> bool:
        """Whether a bracket or a string is open."""
        return self._depth > 0 or self.in_string

    def push(self, letter: str) -> bool:
        """Take the next character; return whether the value is complete with it. Never for a number or a word."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self.in_string = False
                return self._depth == 0
        elif letter == '"':
            self.in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """Reads a call, or a list of calls, from JSON; :attr:`is_done` after the last bracket.

    Place of a character in a call:  key ─► colon ─► value ─► after ─► key …      each of them outside of the others
    """

    __slots__ = ("_in_list", "_key", "_place", "_scanner", "_token", "_writer", "has_arguments", "in_call", "is_done",
                 "other_key")  # fmt: skip

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._in_list = False
        self._scanner = ValueScanner()
        self._place = "after"
        self._key = ""
        self._token: list[str] = []  # of a key or a name
        self.in_call = False
        self.is_done = False
        self.has_arguments = False  # of the call that is open
        self.other_key: str | None = None  # one that calls do not have

    @property
    def in_string(self) -> bool:
        """Whether a string is open, in which markers mean nothing."""
        return self._scanner.in_string

    def push(self, letter: str) -> None:
        """Take the next character."""
        if self.in_call:
            self._push_in_call(letter)
        elif letter == "{":
            self._writer.begin()
            self._writer.add(letter)
            self.in_call, self._place, self._scanner = True, "after", ValueScanner()
            self.has_arguments, self.other_key = False, None
        elif letter == "[" and not self._in_list:
            self._in_list = True
            self._writer.write(Channel.MARKUP, letter)
        else:
            self.is_done = self.is_done or (letter == "]" and self._in_list)
            self._writer.write(Channel.MARKUP, letter)

    def end(self, error: str | None = None) -> None:
        """End a call that is open, whose last brace may be missing if there is no ``error``."""
        if self.in_call:
            self._end_call(error)
        self.is_done = True

    def _end_call(self, error: str | None = None) -> None:
        self.in_call = False
        self._writer.end(error, closing="}")
        self.is_done = not self._in_list

    def _push_in_call(self, letter: str) -> None:
        place = self._place
        if place == "value":
            self._push_value(letter)
        elif place == "key":
            self._writer.add(letter)
            self._token.append(letter)
            if self._scanner.push(letter):
                self._end_key()
        elif letter == "}":
            self._writer.add(letter)
            self._end_call()
        else:
            self._writer.add(letter)
            if place == "after" and letter == '"':
                self._place, self._token = "key", [letter]
                self._scanner.push(letter)
            elif place == "colon" and letter == ":":
                self._place, self._token = "value", []

    def _end_key(self) -> None:
        self._place = "colon"
        self._key = _text_of("".join(self._token))
        if self._key in ARGUMENT_KEYS:
            self.has_arguments = True
        elif self._key not in (*NAME_KEYS, "type", "id"):
            self.other_key = self._key

    def _push_value(self, letter: str) -> None:
        scanner = self._scanner
        if not scanner.is_inside:
            if letter in WHITESPACE and not self._token:
                self._writer.add(letter)
                return
            if letter in ",}" or letter in WHITESPACE:  # a number or a word ends before it
                self._place = "after"
                self._push_in_call(letter)
                return
        self._token.append(letter)
        is_name = self._key in NAME_KEYS and self._writer.name is None
        if self._key in ARGUMENT_KEYS:
            self._writer.add_argument(letter)
        else:
            self._writer.add(letter)
        if scanner.push(letter):
            self._place, self._scanner = "after", ValueScanner()
            if is_name and self._token[0] == '"':
                self._writer.tell_name(_text_of("".join(self._token)))


def _text_of(token: str) -> str:
    """Return the text of a JSON string; a broken one as it stands."""
    try:
        return str(_loads(token))
    except ValueError:
        return token.strip('"')
