"""Tokens to items with channels: text and ids go out together, each once, however markers fall into tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.frontend.parsing.select import OutputFormat
from asyncllm.outputs import Channel, FinishReason, TokenDelta
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import EOS
from asyncllm.wire.messages import EngineFinishReason
from tests.support.frontend import FrontEnd, RecordingSink

PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", ">\nHi", "o<thi", "nk>", '{"name": ', "\n\n"]
THINK, END_THINK, CALL, END_CALL, CLOSES, OPENS, NK, NAME, BREAKS = range(260, 269)
HERMES = OutputFormat(reasoning=("<think>", "</think>"), tool_parser="hermes")
JSON = b'"f", "arguments": {"a": 1}}'


@pytest.fixture(scope="module")
def front_end(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    return FrontEnd(tmp_path_factory.mktemp("model"), pieces=PIECES)


def play(
    front_end: FrontEnd,
    ids: list[int],
    *,
    output: OutputFormat | None = HERMES,
    reason: EngineFinishReason = EngineFinishReason.STOP,
    **params: Any,
) -> RecordingSink:
    """Let the engine send ``ids`` one by one, then the end of sequence (or whatever ends it)."""
    processed = front_end.input.process("Hi", SamplingParams(**params), output=output)
    sink = RecordingSink()
    front_end.output.add_request(processed, sink)
    for token_id in ids:
        if front_end.send(processed, token_id):
            return sink
    front_end.finish(processed, *([EOS] if reason is EngineFinishReason.STOP else []), reason=reason)
    return sink


def of(sink: RecordingSink, channel: Channel) -> str:
    return "".join(delta.text for delta in sink.deltas if delta.channel is channel)


def test_reasoning_a_call_and_content(front_end: FrontEnd) -> None:
    ids = [THINK, *b"\nhm\n", END_THINK, BREAKS, *b"Ok.", CALL, NAME, *JSON, END_CALL, *b"ok"]
    sink = play(front_end, ids)
    done = sink.completion
    assert done is not None
    assert sink.token_ids == [*ids, EOS] == done.token_ids
    assert (
        sink.text
        == done.text
        == '<think>\nhm\n</think>\n\nOk.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>ok'
    )
    assert (done.content, done.reasoning) == ("Ok.ok", "hm")
    assert [(call.name, call.arguments, call.text) for call in done.tool_calls] == [("f", {"a": 1}, '{"a": 1}')]
    assert done.finish_reason is sink.deltas[-1].finish_reason is FinishReason.TOOL_CALLS
    assert [of(sink, channel) for channel in (Channel.CONTENT, Channel.REASONING)] == ["Ok.ok", "hm"]
    assert of(sink, Channel.MARKUP) == "<think>\n\n</think>\n\n<tool_call></tool_call>"


def test_a_call_is_told_as_it_comes(front_end: FrontEnd) -> None:
    sink = play(front_end, [CALL, NAME, *JSON, END_CALL])
    told = [delta.tool_call for delta in sink.deltas if delta.tool_call is not None]
    assert [one.name for one in told] == ["f", *[None] * (len(told) - 1)]
    assert [one.arguments for one in told[1:-1]] == list('{"a": 1}')
    assert told[-1].call is not None
    assert len({one.id for one in told}) == 1


def test_one_token_in_two_channels_gives_two_items_and_the_first_has_the_id(front_end: FrontEnd) -> None:
    sink = play(front_end, [*b"<think", CLOSES, *b"</think", CLOSES])
    assert [(d.text, d.token_ids, d.channel) for d in sink.deltas[:3]] == [
        ("<think>", [*b"<think", CLOSES], Channel.MARKUP),
        ("\n", [], Channel.MARKUP),
        ("Hi", [], Channel.REASONING),
    ]
    assert of(sink, Channel.CONTENT) == "Hi"


def test_a_token_that_may_begin_a_marker_waits_as_a_whole(front_end: FrontEnd) -> None:
    output = OutputFormat(tool_parser="hermes")
    sink = play(front_end, [*b"x", OPENS, *b"!"], output=output)
    assert [(d.text, d.token_ids) for d in sink.deltas[:3]] == [("x", [120]), ("o<thi", [OPENS]), ("!", [33])]
    late = play(front_end, [*b"o<", *b"tool_call>"], output=output)
    assert late.deltas[0] == TokenDelta("o", [ord("o")])
    assert late.deltas[1].text == "<tool_call>"


def test_what_is_held_comes_at_the_end(front_end: FrontEnd) -> None:
    sink = play(front_end, [*b"a\n<too"], reason=EngineFinishReason.LENGTH)
    assert sink.text == "a\n<too"
    assert sink.deltas[-1].text == "\n<too"
    assert sink.deltas[-1].finish_reason is FinishReason.LENGTH
    assert sink.completion is not None
    assert sink.completion.content == "a\n<too"


def test_a_call_cut_off_by_the_length_is_invalid_and_keeps_its_reason(front_end: FrontEnd) -> None:
    sink = play(front_end, [CALL, NAME, *b'"f", "ar'], reason=EngineFinishReason.LENGTH)
    done = sink.completion
    assert done is not None
    assert done.finish_reason is FinishReason.LENGTH
    assert done.tool_calls == []
    assert [(call.name, call.text) for call in done.invalid_tool_calls] == [("f", '{"name": "f", "ar')]
    assert sink.deltas[-1].text == ""
    assert sink.deltas[-1].tool_call is not None
    assert sink.deltas[-1].tool_call.invalid == done.invalid_tool_calls[0]


def test_only_a_call_that_can_be_read_makes_the_reason(front_end: FrontEnd) -> None:
    sink = play(front_end, [CALL, *b"f(1)", END_CALL])
    assert sink.completion is not None
    assert sink.completion.finish_reason is FinishReason.STOP
    assert sink.completion.to_message()["content"] == "f(1)"


def test_the_message_for_the_next_turn(front_end: FrontEnd) -> None:
    sink = play(front_end, [THINK, *b"hm", END_THINK, *b"Ok", CALL, NAME, *JSON, END_CALL])
    assert sink.completion is not None
    (call,) = sink.completion.tool_calls
    assert sink.completion.to_message() == {
        "role": "assistant",
        "content": "Ok",
        "reasoning_content": "hm",
        "tool_calls": [{"id": call.id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }


def test_stop_strings_are_matched_in_the_whole_text(front_end: FrontEnd) -> None:
    sink = play(front_end, [THINK, *b"hm", END_THINK, *b"one two"], stop=[" two"])
    assert sink.completion is not None
    assert (sink.completion.content, sink.completion.stop_reason) == ("one", " two")
    cut = play(front_end, [THINK, *b"one two"], stop=["e t"])
    assert cut.completion is not None
    assert (cut.completion.reasoning, cut.completion.content) == ("on", "")


def test_without_text_nothing_is_looked_for(front_end: FrontEnd) -> None:
    sink = play(front_end, [THINK, *b"hm", END_THINK], detokenize=False)
    assert sink.token_ids == [THINK, *b"hm", END_THINK, EOS]
    assert {delta.channel for delta in sink.deltas} == {Channel.CONTENT}


def test_logprobs_go_with_their_ids(front_end: FrontEnd) -> None:
    from asyncllm.wire.messages import LogprobRows

    processed = front_end.input.process("Hi", SamplingParams(logprobs=0), output=HERMES)
    sink = RecordingSink()
    front_end.output.add_request(processed, sink)
    for token_id in (*b"<think", CLOSES, END_THINK):
        rows = LogprobRows(1, [token_id], [-0.5], [1])
        front_end.send(processed, token_id, logprobs={processed.engine_ids[0]: rows})
    front_end.finish(processed)
    for delta in sink.deltas:
        assert [entry.chosen.token_id for entry in delta.logprobs or []] == delta.token_ids


def test_special_tokens_that_are_markers_are_text(tmp_path: Path) -> None:
    """``<|im_start|>`` stands for a marker here: left out of the text unless the format shows it."""
    front_end = FrontEnd(tmp_path)
    for shown, text in ((frozenset[int](), "ab"), (frozenset([258]), "a<|im_start|>b")):
        output = OutputFormat(tool_parser="hermes", shown_ids=shown)
        assert play(front_end, [97, 258, 259, 98], output=output).text == text


def test_an_abort_delivers_what_is_held(front_end: FrontEnd) -> None:
    processed = front_end.input.process("Hi", SamplingParams(), output=HERMES)
    sink = RecordingSink()
    front_end.output.add_request(processed, sink)
    for token_id in (*b"<think>a", *b"</thi"):
        front_end.send(processed, token_id)
    front_end.output.abort(processed.request_id)
    assert sink.text == "<think>a</thi"
    assert sink.completion is not None
    assert sink.completion.reasoning == "a</thi"


def test_a_failure_delivers_what_is_held(front_end: FrontEnd) -> None:
    processed = front_end.input.process("Hi", SamplingParams(), output=HERMES)
    sink = RecordingSink()
    front_end.output.add_request(processed, sink)
    for token_id in b"<think>a</thi":
        front_end.send(processed, token_id)
    front_end.output.fail(processed.request_id, RuntimeError("gone"))
    assert sink.text == "<think>a</thi"
    assert sink.token_ids == [*b"<think>a</thi"]


def test_samples_are_parsed_apart(front_end: FrontEnd) -> None:
    processed = front_end.input.process("Hi", SamplingParams(n=2), output=HERMES)
    sink = RecordingSink()
    front_end.output.add_request(processed, sink)
    first, second = processed.engine_ids
    front_end.send(first, THINK, 97)
    front_end.send(second, 98)
    front_end.finish(first, reason=EngineFinishReason.LENGTH)
    front_end.finish(second, reason=EngineFinishReason.LENGTH)
    assert sink.completion is not None
    assert [(one.reasoning, one.content) for one in sink.completion.samples] == [("a", ""), (None, "b")]


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 268).filter(lambda i: i not in (256, 257, 258, 259)), max_size=25), spare=st.booleans()
)
def test_the_contract_holds_for_any_tokens(front_end: FrontEnd, ids: list[int], spare: bool) -> None:
    """Joined text and ids are those of the same request without a parser; only the last item may be empty."""
    ids = [*b"<tool_call>", *ids] if spare else ids
    sink, plain = play(front_end, ids), play(front_end, ids, output=None)
    assert sink.text == plain.text
    assert sink.token_ids == plain.token_ids == [*ids, EOS]
    assert all(delta.text for delta in sink.deltas[:-1])
    done = sink.completion
    assert done is not None
    assert done.content == "".join(delta.content for delta in sink.deltas)
    assert (done.reasoning or "") == "".join(delta.reasoning for delta in sink.deltas)
    assert done.text == sink.text
