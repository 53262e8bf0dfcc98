"""A chat request to the text of its prompt and the way in which its output is read.

Here: the arguments of ``chat`` checked and resolved (:class:`ChatOptions`, :class:`ChatProcessor`). Not here: rendering
(:mod:`asyncllm.frontend.chat_template`), parsing (:mod:`asyncllm.frontend.parsing`).

How the arguments work together:

* ``tool_choice="none"`` leaves the tools out of the prompt; the output is not searched for calls.
* ``"auto"``, or nothing, with ``tools``: the model decides; a parser must be known, or named, or waived with "none".
* ``"required"``, or the name of a tool: the whole output is JSON by a schema. Reasoning is not looked for.
* Tools that the prompt does not show, since the template knows none and no message names them, are refused.
* Reasoning is looked for in every other chat with a model that shows the markers, tools or not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncllm.errors import ChatTemplateError, InvalidParameterError, shown
from asyncllm.frontend.chat_template import ChatTemplate
from asyncllm.frontend.parsing.forced import forced_schema, named_tool, tool_names
from asyncllm.frontend.parsing.reasoning import REASONING_MARKERS
from asyncllm.frontend.parsing.select import OutputFormat, detect_reasoning_parser, detect_tool_parser, shown_ids
from asyncllm.frontend.parsing.tools import SPECIAL_MARKERS, TOOL_PARSERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import EngineConfig
    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["ChatOptions", "ChatProcessor", "ChatPrompt"]

OWN_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "self",
)
"""What a template gets from other arguments than ``chat_template_kwargs``."""
NOT_SHOWN = (
    "this chat template does not show tools to the model; give chat_template= one that does (examples/tools.py), "
    "or describe them in a message"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """The arguments of ``chat`` beside the messages, as the caller gave them."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt text, in which the template wrote the special tokens; how the output is read (``None``: as it is)."""

    text: str
    output: OutputFormat | None


class ChatProcessor:
    """Makes prompts of messages. Safe to use from several threads.

    :raises ConfigError: the option ``chat_template`` is not valid jinja.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
        self._template = ChatTemplate.from_checkpoint(checkpoint, config.model.chat_template)
        if config.model.chat_template is not None:
            self._template.prepare()  # told now, not by the first chat
        self._tokenizer = tokenizer
        self._tool_parser = config.frontend.tool_parser
        self._reasoning_parser = config.frontend.reasoning_parser

    def prepare(self) -> None:
        """Compile the chat template, if there is one. Imports jinja2 and takes some 0.1 s, which a first chat saves."""
        self._template.prepare()

    def is_ready(self, options: ChatOptions) -> bool:
        """Return whether the template is compiled; else :meth:`make_prompt` belongs in a thread."""
        try:
            source = self._template.source(_checked_template(options), has_tools=bool(options.tools))
        except InvalidParameterError:  # told by make_prompt
            return True
        return self._template.is_compiled(source)

    def make_prompt(self, messages: Sequence[Any], options: ChatOptions) -> ChatPrompt:
        """Return the prompt for ``messages`` and the format of the output.

        :raises InvalidParameterError: messages or options are malformed or contradict each other.
        :raises ChatTemplateError: the template refuses the messages.
        :raises UnsupportedModelError: the model's template is not valid jinja.
        """
        variables = _checked_variables(options.chat_template_kwargs)
        tools, choice, forced_tool = _resolved_tools(options)
        names = tool_names(tools or ())
        shows_generation = options.add_generation_prompt
        source = self._template.source(_checked_template(options), has_tools=bool(tools))
        render = functools.partial(
            self._template.render,
            messages,
            add_generation_prompt=not options.continue_final_message if shows_generation is None else shows_generation,
            continue_final_message=options.continue_final_message,
            chat_template=source,
            **variables,
        )
        text = render(tools=tools)
        if not all(name in text for name in names):
            _check_shown(tools, text, render)
        output = self._format(source, options, tools, choice, forced_tool)
        if (
            output is not None
            and output.reasoning is not None
            and _ends_open(text, output.reasoning, messages, options)
        ):
            output = OutputFormat(
                reasoning=output.reasoning,
                is_reasoning_open=True,
                tool_parser=output.tool_parser,
                tool_names=output.tool_names,
                shown_ids=output.shown_ids,
            )
        return ChatPrompt(text, output)

    def _format(
        self, source: str, options: ChatOptions, tools: list[Any] | None, choice: str, forced_tool: str | None
    ) -> OutputFormat | None:
        """Return how the output is read, ``None`` if nothing is to be found in it."""
        names = tool_names(tools or ())
        if choice == "required":
            return OutputFormat(
                tool_names=frozenset(names), schema=forced_schema(tools or (), forced_tool), forced_tool=forced_tool
            )
        tool_parser = self._chosen_tool_parser(source, options.tool_parser, bool(tools))
        reasoning = _chosen("reasoning_parser", options.reasoning_parser, self._reasoning_parser, REASONING_MARKERS)
        if reasoning == "auto":
            reasoning = detect_reasoning_parser(source, self._tokenizer)
        if tool_parser is None and reasoning is None:
            return None
        markers = REASONING_MARKERS[reasoning] if reasoning is not None else None
        special = SPECIAL_MARKERS[tool_parser] if tool_parser is not None else ()
        return OutputFormat(
            reasoning=markers,
            tool_parser=tool_parser,
            tool_names=frozenset(names),
            shown_ids=shown_ids((*(markers or ()), *special), self._tokenizer),
        )

    def _chosen_tool_parser(self, source: str, given: str | None, has_tools: bool) -> str | None:
        name = _chosen("tool_parser", given, self._tool_parser, TOOL_PARSERS)
        if name is None or (not has_tools and given is None):
            return None
        if name != "auto":
            return name
        name = detect_tool_parser(source, self._tokenizer)
        if name is None and has_tools:
            _refuse(
                "tool_parser",
                "auto",
                f"{_listed(TOOL_PARSERS)}: neither the chat template nor the tokenizer shows how this model writes "
                "tool calls. 'none' takes them as content, and tool_choice='required' needs no parser",
            )
        return name


def _resolved_tools(options: ChatOptions) -> tuple[list[Any] | None, str, str | None]:
    """Return the tools that the prompt shows, "auto", "none" or "required", and the one tool that is required."""
    given = options.tools
    if given is not None and (isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]
        _refuse("tools", given, "a list of JSON schemas of functions, each a dict")
    tools = list(given) if given else None
    choice = options.tool_choice
    if choice is None or choice in ("auto", "none"):
        return (None, "none", None) if choice == "none" else (tools, "auto", None)
    if tools is None:
        _refuse("tool_choice", cast("object", choice), "given with tools")
    names = tool_names(tools)
    return tools, "required", None if choice == "required" else named_tool(choice, names)


def _check_shown(tools: list[Any] | None, text: str, render: Callable[..., str]) -> None:
    """Refuse ``tools`` that the model does not see: without them the prompt would be this ``text`` too.

    Not for tools that ``text`` names, whatever the template does: a message may describe them.
    """
    try:
        is_same = render(tools=None) == text
    except ChatTemplateError:  # it cannot do without tools, so it reads them
        return
    if is_same:
        value, limit = shown(tools), "tools that the prompt shows"
        raise InvalidParameterError(NOT_SHOWN, parameter="tools", value=value, limit=limit)


def _ends_open(text: str, markers: tuple[str, str], messages: Sequence[Any], options: ChatOptions) -> bool:
    """Return whether the prompt ends inside the reasoning: the template opened it, or the message that goes on did."""
    start, end = markers
    if not options.continue_final_message:
        return text.rstrip().endswith(start)
    final: Any = messages[-1]
    content: Any = cast("Mapping[str, Any]", final).get("content") if isinstance(final, Mapping) else None
    place = content.rfind(start) if isinstance(content, str) else -1
    return place >= 0 and end not in content[place:]


def _chosen(parameter: str, given: str | None, default: str, known: Iterable[str]) -> str | None:
    """Return the parser that the caller or the engine's option names, ``None`` for "none"."""
    name = default if given is None else given
    if name not in ("auto", "none", *known):
        _refuse(parameter, name, f"'auto', 'none', {_listed(known)}")
    return None if name == "none" else name


def _listed(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def _checked_template(options: ChatOptions) -> str | None:
    template = cast("object", options.chat_template)
    if template is not None and not isinstance(template, str):
        _refuse("chat_template", template, "jinja text, or the name of one of the model's templates")
    return template


def _checked_variables(given: Any) -> Mapping[str, Any]:
    """Return the variables for a chat template if they are ones that it can be given."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(name, str) and name not in OWN_VARIABLES for name in cast("Mapping[object, object]", given)
    ):
        _refuse(
            "chat_template_kwargs",
            cast("object", given),
            "a dict of variables of the chat template by name, other than those that chat() has arguments for",
        )
    return cast("Mapping[str, Any]", given)


def _refuse(parameter: str, value: object, limit: str) -> NoReturn:
    value = shown(value)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit
    )
