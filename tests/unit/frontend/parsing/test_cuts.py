"""However the text is cut into pieces, a parser finds the same, and loses nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.frontend.parsing.reasoning import REASONING_MARKERS, ReasoningParser
from asyncllm.frontend.parsing.spans import ContentParser, OutputParser
from asyncllm.frontend.parsing.tools import ForcedCallsParser, HermesParser, Llama3JsonParser, MistralParser
from tests.support.parsing import parse

THINK = REASONING_MARKERS["think"]
TOOLS = frozenset(["f", "get_weather"])

PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": lambda: HermesParser(TOOLS),
    "llama3_json": lambda: Llama3JsonParser(TOOLS),
    "mistral": lambda: MistralParser(TOOLS),
    "required": ForcedCallsParser,
    "named": lambda: ForcedCallsParser("f"),
    "think": lambda: ReasoningParser(THINK, ContentParser(), is_open=False),
    "think, hermes": lambda: ReasoningParser(THINK, HermesParser(TOOLS), is_open=False),
    "open, llama": lambda: ReasoningParser(THINK, Llama3JsonParser(TOOLS), is_open=True),
    "think, mistral": lambda: ReasoningParser(THINK, MistralParser(TOOLS), is_open=False),
}

CALL = '{"name": "f", "arguments": {"a": "\\"</tool_call>[TOOL_CALLS]é", "b": [1, {"c": null}]}}'
TEXTS = [
    "plain text\nwith lines\n\n",
    f"<think>\nhm <b>\n</think>\n\nOk.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\nend\n",
    '{"name": "get_weather", "parameters": {"city": "Zürich"}}; {"name": "x", "parameters": {}} then',
    '\n<|python_tag|>{"parameters": {"a": 1}, "name": "f"}',
    '</think>\n{"answer": "<|python_tag|>"}',
    f"Sure.[TOOL_CALLS] [{CALL}, {CALL}]\nend",
    'a\n\n[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "]"}[TOOL_CALLS]get_weather{"b": []}',
    f"[{CALL}, {CALL}]",
    '{"a": {"b": "}"}} ',
    '<tool_call>{"name": "f", "arguments": {"a": }</tool_call><tool_call>f(1)</tool_call><tool_call></tool_call>',
    '<tool_call>{"name": "f", "arg',
    '[TOOL_CALLS]f{"a": [TOOL_CALLS]g',
    "a\n\n\n\n\n<tool_call>\n\n\n</tool_call>\n\n\n\n</think>\n\n\n\n[TOOL_CALLS]f{}",
    " " * 60 + "\n" * 10 + "<think>a</think>",
    " " * 70 + '{"name": "f", "parameters": {}}',
]
"""Some are made for one parser; the others read them as well, whatever they find."""


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_single_cut_and_every_width(name: str, text: str) -> None:
    whole = parse(PARSERS[name](), [text])
    for place in range(len(text) + 1):
        assert parse(PARSERS[name](), [text[:place], text[place:]]) == whole, place
    for width in range(1, 9):
        pieces = [text[start : start + width] for start in range(0, len(text), width)]
        assert parse(PARSERS[name](), pieces) == whole, width


ATOMS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "[THINK]", '{"name": "f", "arguments": ', '{"name": "g", "parameters": ', '{"a": 1}', "{}", "}", "]", "[", "{", '"',
    "\\", ":", ",", ";", "\n", " ", "\n\n", "<", "</", "<tool", "[TOOL", "name", '"name"', "f", "é", "text ", "null",
    "5",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(PARSERS)),
    atoms=st.lists(st.sampled_from(ATOMS), max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_text_at_any_cuts(name: str, atoms: list[str], cuts: list[int]) -> None:
    text = "".join(atoms)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = parse(PARSERS[name](), [text])
    assert parse(PARSERS[name](), pieces) == whole
    assert parse(PARSERS[name](), text) == whole  # one character at a time
