"""Reasoning stands at the front of the output; what follows is the inner parser's."""

from __future__ import annotations

import pytest

from asyncllm.frontend.parsing.reasoning import REASONING_MARKERS, ReasoningParser
from asyncllm.frontend.parsing.spans import ContentParser
from asyncllm.frontend.parsing.tools import HermesParser, Llama3JsonParser
from tests.support.parsing import Parse, parse

THINK = REASONING_MARKERS["think"]


def think(text: str, *, is_open: bool = False) -> Parse:
    return parse(ReasoningParser(THINK, ContentParser(), is_open=is_open), [text])


def test_reasoning_then_content() -> None:
    found = think("\n<think>\nFirst\n\nsecond.\n</think>\n\nThe answer.\n")
    assert found.runs == [
        ("markup", "\n<think>\n"),
        ("reasoning", "First\n\nsecond."),
        ("markup", "\n</think>\n\n"),
        ("content", "The answer.\n"),
    ]


def test_prompt_that_opened_it() -> None:
    found = think("\nSo.\n</think>\n\nYes", is_open=True)
    assert (found.reasoning, found.content) == ("So.", "Yes")
    assert found.runs[0] == ("markup", "\n")


def test_other_markers() -> None:
    found = parse(ReasoningParser(REASONING_MARKERS["mistral"], ContentParser(), is_open=False), ["[THINK]a[/THINK]b"])
    assert (found.reasoning, found.content) == ("a", "b")


@pytest.mark.parametrize(
    "text", ["Hello", "The <think> tag\n</think>", "<thin", " <b>", "", "\n\n", "<think", "</think>x"]
)
def test_without_a_marker_at_the_front_it_is_content(text: str) -> None:
    assert think(text).content == text
    assert think(text).reasoning == ""


def test_an_output_that_ends_in_it() -> None:
    assert think("<think>\nI wonder\n</th").reasoning == "I wonder\n</th"
    assert think("I wonder", is_open=True).reasoning == "I wonder"
    assert think("<think>").runs == [("markup", "<think>")]
    assert think("", is_open=True).runs == []


def test_empty_reasoning_is_only_markup() -> None:
    found = think("<think>\n\n</think>\n\nHi")
    assert found.runs == [("markup", "<think>\n\n</think>\n\n"), ("content", "Hi")]


def test_tools_after_reasoning_but_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = parse(ReasoningParser(THINK, HermesParser(), is_open=False), [f"<think>{call}</think>\n\n{call}"])
    assert found.reasoning == call
    assert found.arguments == [("f", {})]
    bare = parse(ReasoningParser(THINK, Llama3JsonParser(), is_open=True), ['x</think>\n{"name":"f","parameters":{}}'])
    assert bare.arguments == [("f", {})]
