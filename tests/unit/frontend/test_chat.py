"""What `chat` is asked for, resolved: the prompt, and how its output is read."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest

from asyncllm.checkpoint import open_checkpoint
from asyncllm.config import EngineConfig, FrontendConfig
from asyncllm.errors import ConfigError, InvalidParameterError, UnsupportedModelError
from asyncllm.frontend.chat import ChatOptions, ChatProcessor, ChatPrompt
from asyncllm.frontend.parsing.forced import forced_schema
from asyncllm.frontend.parsing.reasoning import REASONING_MARKERS
from asyncllm.frontend.parsing.select import OutputFormat
from asyncllm.frontend.parsing.tools import SPECIAL_MARKERS, TOOL_PARSERS
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.testing import write_tiny_checkpoint
from tests.unit.frontend.test_public_templates import TIME, WEATHER, source

HI = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools else '' }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path, pieces=["<tool_call>"])


def processor(folder: Path, **options: Any) -> ChatProcessor:
    checkpoint = open_checkpoint(str(folder))
    config = EngineConfig.from_options(str(folder), **options)
    return ChatProcessor(config, checkpoint, Tokenizer.from_checkpoint(checkpoint))


def prompt(folder: Path, template: str, messages: Any = HI, **options: Any) -> ChatPrompt:
    return processor(folder, chat_template=template).make_prompt(messages, ChatOptions(**options))


def output(folder: Path, template: str, **options: Any) -> OutputFormat:
    found = prompt(folder, template, **options).output
    assert found is not None
    return found


def test_the_names_of_options_are_those_of_the_parsers() -> None:
    kinds = typing.get_type_hints(FrontendConfig)
    assert typing.get_args(kinds["tool_parser"]) == ("auto", "none", *TOOL_PARSERS)
    assert typing.get_args(kinds["reasoning_parser"]) == ("auto", "none", *REASONING_MARKERS)
    assert SPECIAL_MARKERS.keys() == TOOL_PARSERS.keys()
    with pytest.raises(ConfigError, match="tool_parser"):
        EngineConfig.from_options("x", tool_parser="nothing")


@pytest.mark.parametrize(
    ("shape", "tool_parser", "reasoning"),
    [
        ("qwen3", "hermes", "think"),
        ("hermes", "hermes", None),
        ("llama3", "llama3_json", None),
        ("mistral", "mistral", None),
    ],
)
def test_parsers_are_chosen_from_the_template(
    folder: Path, shape: str, tool_parser: str, reasoning: str | None
) -> None:
    found = output(folder, source(shape), tools=[WEATHER])
    assert found.tool_parser == tool_parser
    assert found.reasoning == (None if reasoning is None else REASONING_MARKERS[reasoning])
    assert found.tool_names == {"get_weather"}


def test_without_tools_or_reasoning_there_is_no_parser(folder: Path) -> None:
    assert prompt(folder, source("hermes")).output is None
    assert prompt(folder, source("gemma3")).output is None
    found = output(folder, source("qwen3"))
    assert (found.tool_parser, found.reasoning) == (None, ("<think>", "</think>"))


def test_the_tokenizer_tells_where_the_template_does_not(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "[TOOL_CALLS]"))
    found = output(folder, PLAIN, tools=[WEATHER])
    assert found.tool_parser == "mistral"
    assert found.shown_ids == {259}, "a special token that is a marker is part of the text"


def test_a_model_without_a_known_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    with pytest.raises(InvalidParameterError, match="'none' takes them as content") as caught:
        prompt(folder, PLAIN, tools=[WEATHER])
    assert caught.value.parameter == "tool_parser"
    with pytest.raises(InvalidParameterError, match="tool_parser"):
        prompt(folder, source("hermes") + "{# <function= #}", tools=[WEATHER])
    assert prompt(folder, PLAIN, tools=[WEATHER], tool_parser="none").output is None
    assert output(folder, PLAIN, tools=[WEATHER], tool_parser="hermes").tool_parser == "hermes"
    assert output(folder, PLAIN, tool_parser="hermes").tool_parser == "hermes"


def test_engine_options_and_arguments_choose(folder: Path) -> None:
    chat = processor(folder, chat_template=source("qwen3"), tool_parser="mistral", reasoning_parser="none")
    found = chat.make_prompt(HI, ChatOptions(tools=[WEATHER])).output
    assert found == OutputFormat(tool_parser="mistral", tool_names=frozenset(["get_weather"]))
    found = chat.make_prompt(HI, ChatOptions(tools=[WEATHER], tool_parser="none", reasoning_parser="mistral")).output
    assert found is not None
    assert (found.tool_parser, found.reasoning) == (None, ("[THINK]", "[/THINK]"))
    for name in ("tool_parser", "reasoning_parser"):
        with pytest.raises(InvalidParameterError, match=f"{name} is 'x'"):
            chat.make_prompt(HI, ChatOptions(**{name: "x"}))


@pytest.mark.parametrize(
    ("template", "is_open"),
    [("{{ '<think>\n' }}", True), ("<think></think>", False), ("{{ messages[0].content }}</think>", False)],
)
def test_a_prompt_that_ends_in_the_reasoning(folder: Path, template: str, is_open: bool) -> None:
    assert output(folder, template).is_reasoning_open is is_open


@pytest.mark.parametrize(("last", "is_open"), [("<think>hm", True), ("<think>hm</think>Yes", False), ("Yes", False)])
def test_a_message_that_ends_in_the_reasoning(folder: Path, last: str, is_open: bool) -> None:
    template = source("chatml") + "{# <think> #}"
    messages = [*HI, {"role": "assistant", "content": last}]
    found = prompt(folder, template, messages, continue_final_message=True)
    assert found.text.endswith(last)
    assert found.output is not None
    assert found.output.is_reasoning_open is is_open


def test_no_tools_are_shown_with_none(folder: Path) -> None:
    assert prompt(folder, PLAIN, tools=[WEATHER], tool_choice="none") == ChatPrompt("Hi", None)
    assert prompt(folder, PLAIN, tools=[]).text == "Hi"


def test_tools_that_the_model_would_not_see_are_refused(folder: Path) -> None:
    deaf = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for choice in ("auto", "required", "get_weather"):
        with pytest.raises(
            InvalidParameterError, match="does not show tools to the model; give chat_template="
        ) as caught:
            prompt(folder, deaf, tools=[WEATHER], tool_choice=choice)
        assert caught.value.parameter == "tools"
    assert prompt(folder, deaf, tools=[WEATHER], tool_choice="none").text == "Hi"
    described = [{"role": "user", "content": "Call get_weather."}]
    assert prompt(folder, deaf, described, tools=[WEATHER]).output is not None
    with pytest.raises(InvalidParameterError, match="does not show tools"):
        prompt(folder, deaf, described, tools=[WEATHER, TIME])
    needy = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"
    assert prompt(folder, needy, tools=[WEATHER]).text == ""


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("required", None),
        ("now", "now"),
        ({"type": "function", "function": {"name": "now"}}, "now"),
        ({"type": "function", "name": "now"}, "now"),
    ],
)
def test_demanded_calls_say_what_the_output_has_to_be(folder: Path, choice: Any, forced: str | None) -> None:
    found = output(folder, PLAIN, tools=[WEATHER, TIME], tool_choice=choice)
    assert found.schema == forced_schema([WEATHER, TIME], forced)
    assert found.forced_tool == forced


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "nothing"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice"),
        ({"tools": 5}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": WEATHER}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1]"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_is_refused_names_the_parameter(folder: Path, options: Any, parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        prompt(folder, source("chatml"), **options)
    assert caught.value.parameter == parameter


def test_a_request_brings_its_own_template_or_names_one(folder: Path) -> None:
    chat = processor(folder)
    assert chat.make_prompt(HI, ChatOptions(chat_template="{{ x }}", chat_template_kwargs={"x": 5})).text == "5"
    with pytest.raises(InvalidParameterError, match=r"chat_template is not valid: .*line 1") as caught:
        chat.make_prompt(HI, ChatOptions(chat_template="{% if %}"))
    assert caught.value.parameter == "chat_template"


def test_an_option_that_is_no_template_is_told_at_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat_template is not valid: .*line 2") as caught:
        processor(folder, chat_template="\n{{ x | nope }}")
    assert caught.value.parameter == "chat_template"
    chat = processor(write_tiny_checkpoint(tmp_path / "own", chat_template="{% if %}"))
    chat.prepare()  # the model's own: who does not chat need not know
    with pytest.raises(UnsupportedModelError, match="Give `chat_template=`"):
        chat.make_prompt(HI, ChatOptions())


def test_only_a_template_that_is_compiled_is_ready(folder: Path) -> None:
    chat = processor(folder)
    assert not chat.is_ready(ChatOptions())
    chat.prepare()
    assert chat.is_ready(ChatOptions())
    other = ChatOptions(chat_template="other")
    assert not chat.is_ready(other)
    chat.make_prompt(HI, other)
    assert chat.is_ready(other)
    for number in range(100):  # strangers do not push out the model's own
        chat.make_prompt(HI, ChatOptions(chat_template=f"{number}"))
    assert chat.is_ready(ChatOptions())


def test_the_schema_of_a_list_lifts_definitions() -> None:
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    bare = {"name": "g"}
    assert forced_schema([tool, bare], None) == {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": "f"},
                        "arguments": {"type": "object", "properties": {"p": {"$ref": "#/$defs/tool0.P"}}},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"name": {"const": "g"}, "arguments": {"type": "object"}},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                },
            ]
        },
        "$defs": {"tool0.P": {"type": "string"}},
    }
    assert forced_schema([tool, bare], "f") == parameters
    assert forced_schema([tool, bare], "g") == {"type": "object"}
