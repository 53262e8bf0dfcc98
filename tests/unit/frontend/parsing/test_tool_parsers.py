"""Each format as models write it, well and badly. How the text is cut is tested in test_cuts.py."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.frontend.parsing.tools import ForcedCallsParser, HermesParser, Llama3JsonParser, MistralParser
from tests.support.parsing import Parse, parse


def hermes(text: str) -> Parse:
    return parse(HermesParser(), [text])


def llama(text: str, *tools: str) -> Parse:
    return parse(Llama3JsonParser(frozenset(tools)), [text])


def mistral(text: str) -> Parse:
    return parse(MistralParser(), [text])


# ------------------------------------------------------------------------------------------------------------- hermes
def test_hermes_call_between_content() -> None:
    found = hermes('Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>\nDone')
    assert found.runs == [
        ("content", "Let me see."),
        ("markup", "\n<tool_call>\n"),
        ("tool_call", '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'),
        ("markup", "\n</tool_call>\n"),
        ("content", "Done"),
    ]
    assert found.arguments == [("f", {"a": [1, {"b": "}"}]})]
    assert found.calls[0].arguments == '{"a": [1, {"b": "}"}]}'


def test_hermes_several_calls_and_a_list_of_calls() -> None:
    two = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>'
    assert hermes(two).arguments == [("f", {}), ("g", {})]
    assert hermes(two).content == ""
    listed = '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</tool_call>'
    assert hermes(listed).arguments == [("f", {"x": 1}), ("g", {})]
    assert hermes('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>').arguments == [("f", {}), ("g", {})]


def test_hermes_arguments_before_the_name_are_told_after_it() -> None:
    found = hermes('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>')
    assert found.arguments == [("f", {"a": 1})]


@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_hermes_end_marker_may_be_missing(end: str) -> None:
    assert hermes('<tool_call>{"name": "f", "arguments": {"a": 1}}' + end).arguments == [("f", {"a": 1})]


def test_a_marker_inside_an_argument_is_part_of_it() -> None:
    found = hermes('<tool_call>{"name": "f", "arguments": {"code": "x = \\"</tool_call>\\" <tool_call>"}}</tool_call>')
    assert found.arguments == [("f", {"code": 'x = "</tool_call>" <tool_call>'})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": 1}', {"a": 1}),  # the last brace is missing
        ('{"name": "f", "arguments": {"a": 1}}}', {"a": 1}),  # one too many
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),  # JSON in a string
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"name": "f", "arguments": {"a": "one\ntwo"}}', {"a": "one\ntwo"}),  # a bare line break
        ('{"name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name" : "f" , "arguments" : {"a": 1} }', {"a": 1}),
        ('{"type": "function", "name": "f", "arguments": {}}', {}),
    ],
)
def test_what_models_write_instead_is_understood(written: str, arguments: dict[str, Any]) -> None:
    found = hermes(f"<tool_call>{written}</tool_call>ok")
    assert found.arguments == [("f", arguments)]
    assert found.content == "ok"


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ('{"name": "f", "arguments": {"a": }}', "not valid JSON"),
        ('{"name": "f", "arguments": {"a": 1, oops}}', "not valid JSON"),
        ('{"name": "f", "arguments": [1]}', "no JSON object"),
        ('{"name": "f", "arguments": "x"}', "not valid JSON"),
        ('{"name": "f", "arguments": 5}', "no JSON object"),
        ('{"arguments": {}}', "no name"),
        ('{"name": 5, "arguments": {}}', "no name"),
        ('{"function": {"name": "f"}}', "no name"),
        ("f(1)", "not valid JSON"),
        ("", "empty"),
        ('{"name": "f", "arguments": {"a": [', "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_told_with_its_text(written: str, error: str) -> None:
    found = hermes(f"a<tool_call>{written}</tool_call>b")
    assert len(found.errors) == 1
    assert error in found.errors[0]
    assert found.calls[0].invalid is not None
    assert found.calls[0].invalid[1] == written
    assert found.content == "ab"


def test_an_output_that_ends_in_a_call_is_told() -> None:
    found = hermes('<tool_call>{"name": "f", "arguments": {"a": 1')
    assert found.calls[0].name == "f"
    assert found.calls[0].arguments == '{"a": 1'
    assert found.errors == ["the output ended before the call was complete"]
    assert hermes("<tool_call>").errors == ["the output ended before the call was complete"]
    # Without the end marker nobody knows that the last brace was not to come.
    assert hermes('<tool_call>{"name": "f", "arguments": {}').errors


def test_a_string_that_never_ends_takes_the_rest() -> None:
    found = hermes('<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call> and more')
    assert found.errors
    assert found.content == ""


def test_deep_nesting_is_no_crash() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert hermes('<tool_call>{"name": "f", "arguments": {"a": ' + deep + "}}</tool_call>").errors


def test_at_most_two_line_breaks_wait_for_a_marker() -> None:
    parser = HermesParser()
    assert "".join(span.text for span in parser.feed("\n" * 50)) == "\n" * 48
    assert hermes('a\n\n\n<tool_call>{"name": "f"}</tool_call>').content == "a\n"


def test_text_that_only_looks_like_a_marker_is_content() -> None:
    for text in ("a <tool_cal b", "<", "\n\n", "x\n<tool", "<<tool_call", "</tool_call>"):
        assert hermes(text).content == text


# -------------------------------------------------------------------------------------------------------- llama3_json
def test_llama_call_and_several() -> None:
    assert llama('{"name": "f", "parameters": {"a": 1}}').arguments == [("f", {"a": 1})]
    two = llama(' {"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}} ;\n')
    assert two.arguments == [("f", {}), ("g", {"b": 2})]
    assert two.content == ""
    assert [text for channel, text in two.runs if channel == "markup"] == [" ", "; ", " ;\n"]


def test_llama_python_tag() -> None:
    found = llama('<|python_tag|>{"name": "f", "parameters": {"a": 1}}')
    assert found.arguments == [("f", {"a": 1})]
    assert llama('So:\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}').arguments == [("f", {})]
    code = llama("<|python_tag|>print(1)")
    assert code.runs == [("markup", "<|python_tag|>"), ("content", "print(1)")]


def test_llama_what_stays_undecided_for_long_is_content() -> None:
    text = '{"type": "' + "x" * 2_000
    assert "".join(span.text for span in Llama3JsonParser().feed(text)) == text
    assert "".join(span.text for span in Llama3JsonParser().feed(" " * 100)) != ""
    late = '{"parameters": {"a": "' + "x" * 2_000 + '"}, "name": "f"}'
    assert llama(late).arguments == [("f", {"a": "x" * 2_000})]


def test_llama_order_of_keys() -> None:
    assert llama('{"parameters": {"a": 1}, "name": "f"}').arguments == [("f", {"a": 1})]
    assert llama('{"type": "function", "function": "f", "parameters": {"a": 1}}').arguments == [("f", {"a": 1})]


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        "{}",
        "{ not JSON",
        '{"name": "Bo',
        "  plain",
        'see {"name": "f", "parameters": {}}',
        "  ",
    ],
)
def test_llama_json_that_is_no_call_is_content(text: str) -> None:
    found = llama(text, "f")
    assert found.content == text
    assert found.calls == []


def test_llama_a_known_name_is_enough_and_an_unknown_one_with_parameters() -> None:
    assert llama('{"name": "f"}', "f").arguments == [("f", {})]
    assert llama('{"name": "g", "parameters": {}}', "f").arguments == [("g", {})]


def test_llama_content_after_a_call() -> None:
    found = llama('{"name": "f", "parameters": {}} Now I wait.')
    assert found.arguments == [("f", {})]
    assert found.content == " Now I wait."


def test_llama_a_call_before_text_that_is_none_is_kept() -> None:
    found = llama('{"name": "f", "parameters": {}}; {"x": 1}', "f")
    assert found.arguments == [("f", {})]
    assert found.content == '{"x": 1}'


def test_llama_json_that_was_no_call_does_not_count() -> None:
    found = llama('{} or <|python_tag|>{"name": "f", "parameters": {}}')
    assert found.arguments == [("f", {})]


def test_llama_output_that_ends_in_a_call() -> None:
    assert llama('{"name": "f", "parameters": {"a"', "f").errors == ["the output ended before the call was complete"]


# ------------------------------------------------------------------------------------------------------------ mistral
def test_mistral_list() -> None:
    found = mistral('Sure.[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]')
    assert found.arguments == [("f", {"a": [1]}), ("g", {})]
    assert found.content == "Sure."


def test_mistral_name_and_arguments() -> None:
    found = mistral('[TOOL_CALLS]f{"a": "[TOOL_CALLS]{"}[TOOL_CALLS]g[ARGS]{"b": 2}')
    assert found.arguments == [("f", {"a": "[TOOL_CALLS]{"}), ("g", {"b": 2})]


def test_mistral_id_is_taken() -> None:
    spans = MistralParser().feed('[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}')
    assert [span.tool_call.id for span in spans if span.tool_call] == ["abcdefgh1"] * 2
    assert spans[-1].tool_call is not None
    assert spans[-1].tool_call.call is not None
    assert spans[-1].tool_call.call.id == "abcdefgh1"


def test_mistral_id_that_is_made_has_nine_letters() -> None:
    (span,) = [span for span in MistralParser().feed("[TOOL_CALLS]f{}") if span.tool_call and span.tool_call.call]
    assert span.tool_call is not None
    assert len(span.tool_call.id) == 9
    assert span.tool_call.id.isalnum()


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("[TOOL_CALLS]f", "f"),
        ("[TOOL_CALLS]f[TOOL_CALLS]g{}", "f"),
        ('[TOOL_CALLS]f{"a": 1', 'f{"a": 1'),
        ('[TOOL_CALLS]f{"a": [TOOL_CALLS]g{}', 'f{"a": '),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a"', '{"name": "f", "arguments": {"a"'),
        ('[TOOL_CALLS][{"name": "f", [TOOL_CALLS]g{}', '{"name": "f", '),
    ],
)
def test_mistral_broken_calls(text: str, written: str) -> None:
    found = mistral(text)
    assert found.calls[0].invalid is not None
    assert found.calls[0].invalid[1] == written
    assert found.arguments == ([("g", {})] if text.endswith("g{}") else [])


def test_mistral_content_goes_on_after_a_call() -> None:
    assert mistral("[TOOL_CALLS]f{}\nNow.").content == "Now."
    assert mistral("[TOOL_CALLS][]").runs == [("markup", "[TOOL_CALLS][]")]


# ------------------------------------------------------------------------------------------------------------- forced
def test_forced_list_and_named() -> None:
    listed = parse(ForcedCallsParser(), ['[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'])
    assert listed.arguments == [("f", {"a": 1}), ("g", {})]
    named = parse(ForcedCallsParser("f"), [' {"a": 1}\n'])
    assert named.arguments == [("f", {"a": 1})]
    assert named.calls[0].name == "f"


@pytest.mark.parametrize(("name", "text"), [(None, ""), (None, '[{"name": "f"'), (None, "No."), ("f", ""), ("f", "{")])
def test_forced_output_that_is_something_else(name: str | None, text: str) -> None:
    found = parse(ForcedCallsParser(name), [text])
    assert len(found.errors) == 1
    assert found.arguments == []
