"""Chat messages to prompt text, as Hugging Face's ``apply_chat_template`` renders it.

A template comes with a model, so it is code of a stranger: it runs in jinja2's immutable sandbox, and sees plain data
only. Where a template could not read what OpenAI's clients send (contents as parts, arguments as JSON text), it gets
what it can read; what transformers would render is rendered the same, byte for byte.

Source: the ``chat_template`` contract of transformers (trimmed blocks, ``loopcontrols``, ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``{% generation %}`` blocks, which mean nothing here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncllm.errors import (
    AsyncLLMError,
    ChatTemplateError,
    ConfigError,
    InvalidParameterError,
    UnsupportedModelError,
    shown,
)
from asyncllm.frontend.template_compiler import CompiledTemplate, InvalidTemplate, TemplateRefusal, compile_template

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint

__all__ = ["ChatTemplate"]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names that reasoning is passed under; templates read the first or the second."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE "
NO_TEMPLATE = (
    "the model {model!r} has no chat template. Give `chat_template=` its jinja text, or make the prompt "
    "yourself and use generate() or stream()"
)
MAX_COMPILED = 32
"""Templates kept compiled: the model's own, and those that requests bring along."""


class ChatTemplate:
    """A model's chat template, compiled on first use. Safe to use from several threads."""

    def __init__(
        self,
        source: str | None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        model: str = "",
        named: Any = None,
        is_option: bool = False,
    ) -> None:
        """Keep the text of a template, ``None`` where the model has none.

        ``special_tokens`` (``bos_token`` …) are variables of the template; ``named`` maps further templates by name, of
        which ``tool_use`` is taken where tools are given. ``is_option``: the text is the
        engine's option, not the model's.
        """
        self._model = model
        self._special_tokens = dict(special_tokens or {})
        self._name_to_source: dict[str, str] = {**(named or {})}
        if source is not None:
            self._name_to_source["default"] = source
        self._is_option = is_option
        self._source_to_compiled: dict[str, CompiledTemplate] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, override: str | None = None) -> ChatTemplate:
        """Return the template of ``checkpoint``, or ``override`` (the option ``chat_template``) in its place."""
        config = checkpoint.tokenizer_config
        special = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
        source = config.get("chat_template") if override is None else override
        named = config.get("chat_templates") if override is None else None
        is_option = override is not None
        return cls(source, special_tokens=special, model=checkpoint.source, named=named, is_option=is_option)

    def prepare(self) -> None:
        """Compile the model's templates, so that rendering takes microseconds; the first chat tells what is wrong.

        :raises ConfigError: the option ``chat_template`` is not valid jinja.
        """
        for source in self._name_to_source.values():
            with contextlib.suppress(UnsupportedModelError):
                self._compiled(source)

    def source(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """Return the text of the template that a request uses: ``chat_template``, which may be a name, or the model's.

        :raises InvalidParameterError: there is none.
        """
        if chat_template is not None:
            return self._name_to_source.get(chat_template, chat_template)
        name = "tool_use" if has_tools and "tool_use" in self._name_to_source else "default"
        source = self._name_to_source.get(name)
        if source is None:
            names = [name for name in sorted(self._name_to_source) if name != "tool_use"]
            hint = f". It has templates named {', '.join(map(repr, names))}" if names else ""
            raise InvalidParameterError(
                NO_TEMPLATE.format(model=self._model) + hint, parameter="messages", limit="a model with a chat template"
            )
        return source

    def is_compiled(self, source: str) -> bool:
        """Return whether the template is ready; compiling one takes some milliseconds."""
        return source in self._source_to_compiled

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text for ``messages``; ``variables`` are given to the template as they are.

        A message is a mapping (or dataclass, or pydantic model) with ``role`` and ``content``: a text, or a list of
        parts. Parts that are all ``{"type": "text", "text": …}`` are joined for a template that expects a text, and
        arguments of tool calls that are JSON text become objects for one that expects those.
        ``continue_final_message`` ends the prompt inside the last message, so that the model goes on with it.

        :raises InvalidParameterError: messages are malformed, or there is no template.
        :raises ChatTemplateError: the template refuses them, in its own words (``reason``), or fails on them.
        :raises UnsupportedModelError: the model's template is not valid jinja; a template that was given:
            InvalidParameterError, as an option: ConfigError.
        """
        try:
            chat, plain_tools = _plain_messages(messages), _plain_tools(tools)
            values = {"documents": None, **self._special_tokens, **cast("dict[str, Any]", _plain(variables))}
        except RecursionError:
            _refuse("messages", messages, "nested less deeply, with no list or dict inside itself")
        compiled = self._compiled(self.source(chat_template, has_tools=bool(plain_tools)))
        for index, message in enumerate(chat):
            _fit(f"messages[{index}]", message, compiled)
        final_text = ""
        if continue_final_message:
            if add_generation_prompt:
                _refuse("continue_final_message", True, "given with add_generation_prompt=False")
            final_text = _mark_end(chat[-1])
        values |= {"messages": chat, "tools": plain_tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = compiled.template.render(values)
        except Exception as error:  # a template can raise anything that its expressions raise
            raise self._refusal(error, messages) from error
        return _cut_at_mark(text, final_text) if continue_final_message else text

    def _refusal(self, error: Exception, messages: object) -> ChatTemplateError:
        verb = "refuses" if isinstance(error, TemplateRefusal) else "fails on"
        return ChatTemplateError(
            f"the chat template of {self._model!r} {verb} these messages: {error}",
            parameter="messages",
            value=shown(messages),
            limit="messages that the chat template takes",
            reason=str(error) if isinstance(error, TemplateRefusal) else None,
        )

    def _invalid(self, source: str, why: str) -> AsyncLLMError:
        """Return the error that blames whose template it is: the request's, the engine's option, or the model's."""
        if source in self._name_to_source.values() and not self._is_option:
            return UnsupportedModelError(
                f"the chat template of {self._model!r} is not valid: {why}. Give `chat_template=` another one",
                model=self._model,
                feature="chat template",
            )
        kind = ConfigError if source in self._name_to_source.values() else InvalidParameterError
        value, limit = shown(source), "jinja text, or the name of one of the model's templates"
        return kind(f"chat_template is not valid: {why}", parameter="chat_template", value=value, limit=limit)

    def _compiled(self, source: str) -> CompiledTemplate:
        known = self._source_to_compiled
        compiled = known.get(source)
        if compiled is None:
            try:
                compiled = compile_template(source)
            except InvalidTemplate as error:
                raise self._invalid(source, str(error)) from error
            if len(known) >= MAX_COMPILED:  # the newest of the strangers goes, the model's own were first
                known.pop(next(reversed(known)), None)
            known[source] = compiled
        return compiled


# ------------------------------------------------------------------------------------------------------ messages
def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        _refuse("messages", messages, "a list of messages")
    if not messages:
        _refuse("messages", "[]", "at least one message")
    return [_plain_message(index, message) for index, message in enumerate(cast("Sequence[Any]", messages))]


def _plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    plain = _plain(tools)
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in cast("list[object]", plain)):
        _refuse("tools", tools, "a list of JSON schemas of functions, each a dict")
    return cast("list[dict[str, Any]]", plain)


def _plain_message(index: int, given: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    message = _plain(given)
    if not isinstance(message, dict):
        _refuse(name, given, "a mapping with 'role' and 'content'")
    # Some clients write absent fields as None, which many templates would print.
    message = {key: value for key, value in cast("dict[str, Any]", message).items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f"{name}.role", role, "a string such as 'user'")
    if "content" in message:
        message["content"] = _plain_content(f"{name}.content", message["content"])
    elif not message.get("tool_calls"):
        _refuse(f"{name}.content", None, "a text or a list of parts (only a message with tool_calls has none)")
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_content(name: str, content: Any) -> Any:
    """Return ``content`` as a template takes it: texts joined to one, other parts as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(name, content, "a text or a list of parts")
    parts = cast("list[Any]", content)
    for index, part in enumerate(parts):
        if not isinstance(part, (str, dict)):
            _refuse(f"{name}[{index}]", part, "a text or a mapping with 'type'")
        if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") == "text":
            text = cast("dict[str, Any]", part).get("text")
            if not isinstance(text, str):
                _refuse(f"{name}[{index}].text", text, "a text")
    return parts


def _fit(name: str, message: dict[str, Any], compiled: CompiledTemplate) -> None:
    """Bring what OpenAI's clients send to the form that the template reads."""
    content = message.get("content")
    if isinstance(content, list):
        parts = cast("list[str | dict[str, Any]]", content)
        is_text = all(isinstance(part, str) or part.get("type") == "text" for part in parts)
        if is_text and not compiled.takes_parts:
            message["content"] = "".join(part if isinstance(part, str) else part["text"] for part in parts)
    calls = message.get("tool_calls")
    if compiled.takes_argument_text or not isinstance(calls, list):
        return
    for index, call in enumerate(cast("list[Any]", calls)):
        function: Any = cast("dict[str, Any]", call).get("function", call) if isinstance(call, dict) else None
        arguments = cast("dict[str, Any]", function).get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                function["arguments"] = json.loads(arguments or "{}", strict=False)
                continue
            _refuse(f"{name}.tool_calls[{index}].function.arguments", arguments, "a dict, or JSON text of one")


def _plain(value: Any) -> Any:
    """Return ``value`` rebuilt of plain JSON types, so that a template finds no method it could misuse."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # subclasses (enums …) lose their methods
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic
        return _plain(dump())
    return f"<{type(value).__name__}>"


def _mark_end(message: dict[str, Any]) -> str:
    """Mark the end of the message's (last) text, and return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict) and "text" in part]
    if not texts:
        _refuse("continue_final_message", True, "used where the last message has a text as its content")
    last = texts[-1]
    text = str(last["text"])
    last["text"] = text + CONTINUE_MARK
    return text


def _cut_at_mark(text: str, final_text: str) -> str:
    """Return ``text`` up to the end of the last message; a template that trims contents takes the space of the mark."""
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0 or final_text.strip() not in text:
        _refuse("continue_final_message", True, "used with a chat template that writes the last message out")
    was_trimmed = not text.startswith(CONTINUE_MARK, place)
    return text[:place].rstrip() if was_trimmed else text[:place]


def _refuse(parameter: str, value: Any, limit: str) -> NoReturn:
    value = shown(value)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit
    )
