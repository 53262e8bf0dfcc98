"""Chat messages to prompt text, as Hugging Face's ``apply_chat_template`` renders it.

A template comes with a model, so it is code of a stranger: it runs in jinja2's immutable sandbox, and sees plain data
only.

Source: the ``chat_template`` contract of transformers (trimmed blocks, ``loopcontrols``, ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, ``{% generation %}`` blocks, which mean nothing here).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncllm.errors import InvalidParameterError, UnsupportedModelError, shown

if TYPE_CHECKING:
    import jinja2
    from jinja2.parser import Parser

    from asyncllm.checkpoint import Checkpoint

__all__ = ["ChatTemplate"]

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names that reasoning is passed under; templates read the first or the second."""
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE "
NO_TEMPLATE = (
    "the model {model!r} has no chat template. Give `chat_template=` its jinja text, or make the prompt "
    "yourself and use generate() or stream()"
)


class ChatTemplate:
    """A model's chat template, compiled on first use. Safe to use from several threads."""

    def __init__(
        self, source: str | None, *, special_tokens: Mapping[str, str] | None = None, model: str = "", named: Any = None
    ) -> None:
        """Keep the text of a template, ``None`` where the model has none.

        ``special_tokens`` (``bos_token`` …) are variables of the template; ``named`` maps further templates by name, of
        which ``tool_use`` is taken where tools are given.
        """
        self._model = model
        self._special_tokens = dict(special_tokens or {})
        self._name_to_source: dict[str, str] = {**(named or {})}
        if source is not None:
            self._name_to_source["default"] = source
        self._name_to_template: dict[str, jinja2.Template] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, override: str | None = None) -> ChatTemplate:
        """Return the template of ``checkpoint``, or ``override`` (the option ``chat_template``) in its place."""
        config = checkpoint.tokenizer_config
        special = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
        source = config.get("chat_template") if override is None else override
        named = config.get("chat_templates") if override is None else None
        return cls(source, special_tokens=special, model=checkpoint.source, named=named)

    def prepare(self) -> None:
        """Compile the default template, so that rendering takes microseconds; the first chat tells what is wrong."""
        if "default" in self._name_to_source:
            with contextlib.suppress(UnsupportedModelError):
                self._template("default")

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt text for ``messages``; ``variables`` are given to the template as they are.

        A message is a mapping (or dataclass, or pydantic model) with ``role`` and ``content``: a text, or a list of
        parts. Parts that are all ``{"type": "text", "text": …}`` are joined, since most templates expect a text.
        ``continue_final_message`` ends the prompt inside the last message, so that the model goes on with it.

        :raises InvalidParameterError: messages are malformed, the template refuses them, or there is no template.
        :raises UnsupportedModelError: the template is not valid jinja.
        """
        try:
            chat, plain_tools = _plain_messages(messages), _plain_tools(tools)
            values = {"documents": None, **self._special_tokens, **cast("dict[str, Any]", _plain(variables))}
        except RecursionError:
            _refuse("messages", messages, "nested less deeply, with no list or dict inside itself")
        if continue_final_message:
            if add_generation_prompt:
                _refuse("continue_final_message", True, "given with add_generation_prompt=False")
            _mark_end(chat[-1])
        template = self._template("tool_use" if plain_tools and "tool_use" in self._name_to_source else "default")
        values |= {"messages": chat, "tools": plain_tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = template.render(values)
        except Exception as error:  # a template can raise anything that its expressions raise
            raise InvalidParameterError(
                f"the chat template of {self._model!r} refuses these messages: {error}",
                parameter="messages",
                value=shown(messages),
                limit="messages that the chat template takes",
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._name_to_template:
            source = self._name_to_source.get(name)
            if source is None:
                raise InvalidParameterError(
                    NO_TEMPLATE.format(model=self._model), parameter="messages", limit="a model with a chat template"
                )
            self._name_to_template[name] = _compile(source, self._model)
        return self._name_to_template[name]


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
    if all(isinstance(part, str) or cast("dict[str, Any]", part).get("type") == "text" for part in parts):
        return "".join(part if isinstance(part, str) else part["text"] for part in parts)
    return parts


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


def _mark_end(message: dict[str, Any]) -> None:
    if not isinstance(message.get("content"), str):
        _refuse("continue_final_message", True, "used where the last message has a text as its content")
    message["content"] += CONTINUE_MARK


def _cut_at_mark(text: str) -> str:
    """Return ``text`` up to the end of the last message; a template that trims contents takes the space of the mark."""
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0:
        _refuse("continue_final_message", True, "used with a chat template that writes the last message out")
    was_trimmed = not text.startswith(CONTINUE_MARK, place)
    return text[:place].rstrip() if was_trimmed else text[:place]


# ------------------------------------------------------------------------------------------------------ templates
def _compile(source: str, model: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedModelError(
            f"the chat template of {model!r} is not valid: {error} (line {error.lineno}). "
            "Give `chat_template=` another one",
            model=model,
            feature="chat template",
        ) from error


def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions = cast("dict[str, Any]", environment.globals)
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment


def _generation_extension() -> type[Any]:
    """Return the extension that takes ``{% generation %}…{% endgeneration %}`` for its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(lineno)

    return Generation


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates use
    return datetime.now().strftime(format)


def _refuse(parameter: str, value: Any, limit: str) -> NoReturn:
    value = shown(value)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit
    )
