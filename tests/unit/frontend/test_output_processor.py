"""From engine messages to items, ends and errors, one behaviour per test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import (
    DuplicateRequestError,
    EngineDeadError,
    ErrorInfo,
    InvalidParameterError,
    RequestFailedError,
)
from asyncllm.frontend.detokenizer import Detokenizer
from asyncllm.outputs import FinishReason, TokenDelta
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import EOS
from asyncllm.wire.messages import EngineCoreOutputs, EngineFinishReason, FinishedRequest, RequestTimes
from tests.support.frontend import FrontEnd, RecordingSink

STOP, ABORT, ERROR = EngineFinishReason.STOP, EngineFinishReason.ABORT, EngineFinishReason.ERROR


@pytest.fixture
def front(tmp_path: Path) -> FrontEnd:
    return FrontEnd(tmp_path, pieces=["own f", "EF", "HI", " end"])


OWN_F, EF, HI, END = 260, 261, 262, 263


# --------------------------------------------------------------------------------------------------------- items
def test_one_item_per_token_and_the_last_has_the_reason(front: FrontEnd) -> None:
    request, sink = front.open()
    assert front.send(request, *b"a") == []
    front.send(request, *b"b")
    front.finish(request, *b"c")
    assert sink.deltas == [
        TokenDelta("a", [97]),
        TokenDelta("b", [98]),
        TokenDelta("c", [99], finish_reason=FinishReason.LENGTH),
    ]
    assert front.output.num_unfinished == 0


def test_r43_several_tokens_in_one_message_are_several_items(front: FrontEnd) -> None:
    request, sink = front.open()
    ids = [97 + index % 26 for index in range(200)]
    front.finish(request, *ids)
    assert [delta.token_ids for delta in sink.deltas] == [[token_id] for token_id in ids]
    assert [delta.finish_reason for delta in sink.deltas[:-1]] == [None] * 199


def test_b1_every_request_of_a_message_gets_its_own_tokens(front: FrontEnd) -> None:
    opened = [front.open() for _ in range(20)]
    for step in range(5):
        ids = [request.engine_ids[0] for request, _ in opened]
        front.output.process(EngineCoreOutputs(ids, [97 + (index + step) % 26 for index in range(20)]))
    for index, (request, sink) in enumerate(opened):
        front.finish(request)
        assert sink.token_ids == [97 + (index + step) % 26 for step in range(5)]
    assert front.output.num_unfinished == 0


@given(data=st.data())
@settings(max_examples=60)
def test_b92_any_cut_into_messages_gives_the_same_text_and_ids(tmp_path_factory: Any, data: st.DataObject) -> None:
    front = _shared_front(tmp_path_factory)
    ids = data.draw(st.lists(st.integers(0, 263), min_size=1, max_size=30))
    request, sink = front.open(skip_special_tokens=data.draw(st.booleans()))
    rest = list(ids)
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        if cut == len(rest):
            front.finish(request, *rest)
        else:
            front.send(request, *rest[:cut])
        rest = rest[cut:]
    skip = request.params.skip_special_tokens
    assert sink.text == front.tokenizer.decode(ids, skip)
    assert sink.token_ids == ids
    assert all(delta.text for delta in sink.deltas[:-1])
    assert sink.completion is not None
    assert (sink.completion.text, sink.completion.token_ids) == (sink.text, ids)


_FRONTS: list[FrontEnd] = []


def _shared_front(tmp_path_factory: pytest.TempPathFactory) -> FrontEnd:
    if not _FRONTS:
        _FRONTS.append(FrontEnd(tmp_path_factory.mktemp("front"), pieces=["own f", "EF", "HI", " end"]))
    return _FRONTS[0]


def test_b103_detokenize_false_gives_ids_without_text(front: FrontEnd) -> None:
    request, sink = front.open(detokenize=False)
    front.send(request, *b"ab")
    front.finish(request, EOS, reason=STOP)
    assert [(delta.text, delta.token_ids) for delta in sink.deltas] == [("", [97]), ("", [98]), ("", [EOS])]


def test_r38_end_inside_a_character(front: FrontEnd) -> None:
    request, sink = front.open(max_tokens=4)
    front.send(request, *b"hi", 0xF0)
    front.finish(request, 0x9F)
    assert sink.deltas[-1] == TokenDelta("\ufffd", [0xF0, 0x9F], finish_reason=FinishReason.LENGTH)
    assert sink.completion is not None
    assert sink.completion.usage.completion_tokens == 4


def test_late_outputs_of_unknown_requests_are_ignored(front: FrontEnd) -> None:
    request, sink = front.open()
    front.output.abort(request.request_id, deliver=False)
    assert front.send(request, *b"late") == []
    assert front.finish(request, *b"later") == []
    assert front.send(12345, 97) == []
    assert sink.deltas == []


# ---------------------------------------------------------------------------------------------------------- ends
def test_b96_r46_end_of_sequence_is_in_the_ids_and_not_in_the_text(front: FrontEnd) -> None:
    request, sink = front.open()
    front.send(request, *b"ab")
    front.finish(request, EOS, reason=STOP)
    assert sink.deltas[-1] == TokenDelta("", [EOS], finish_reason=FinishReason.STOP)
    completion = sink.completion
    assert completion is not None
    assert (completion.text, completion.token_ids) == ("ab", [97, 98, EOS])
    assert len(completion.token_ids) == completion.usage.completion_tokens
    assert completion.stop_reason is None


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab end")])
def test_b96_b55_stop_token_with_and_without_its_text(front: FrontEnd, include: bool, text: str) -> None:
    request, sink = front.open(stop_token_ids=[END], include_stop_str_in_output=include)
    front.send(request, *b"ab")
    assert front.finish(request, END, reason=STOP, stop_token_id=END) == []
    assert (sink.text, sink.token_ids) == (text, [97, 98, END])
    assert (sink.deltas[-1].finish_reason, sink.deltas[-1].stop_reason) == (FinishReason.STOP, END)


def test_r45_the_reason_is_that_of_this_request(front: FrontEnd) -> None:
    first, _ = front.open(stop_token_ids=[END], request_id="session")
    front.finish(first, END, reason=STOP, stop_token_id=END)
    second, sink = front.open(request_id="session")
    front.finish(second, *b"a")
    assert sink.completion is not None
    assert (sink.completion.finish_reason, sink.completion.stop_reason) == (FinishReason.LENGTH, None)


def test_soft_end_by_the_engine_is_abort(front: FrontEnd) -> None:
    request, sink = front.open()
    front.send(request, *b"ab")
    front.finish(request, reason=ABORT)
    assert sink.deltas[-1] == TokenDelta("", [], finish_reason=FinishReason.ABORT)
    assert sink.completion is not None
    assert sink.completion.text == "ab"


def test_b8_exactly_one_item_of_each_sample_has_a_reason(front: FrontEnd) -> None:
    request, sink = front.open(n=3)
    for token_id in b"xyz":
        front.output.process(EngineCoreOutputs(request.engine_ids, [token_id] * 3))
    for engine_id in reversed(request.engine_ids):
        front.finish(engine_id, EOS, reason=STOP)
    ended = [delta.index for delta in sink.deltas if delta.finish_reason is not None]
    assert ended == [2, 1, 0]


# -------------------------------------------------------------------------------------------------- stop strings
@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xDEFGHI")])
def test_b97_stop_string_aborts_the_engine_and_ends_the_sample(front: FrontEnd, include: bool, text: str) -> None:
    request, sink = front.open(stop="DEFGHI", include_stop_str_in_output=include)
    assert front.send(request, ord("x"), ord("D"), EF, ord("G")) == []
    assert sink.texts == ["x"]
    assert front.send(request, HI, *b"more") == [request.engine_ids[0]]
    assert sink.text == text
    assert sink.token_ids == [ord("x"), ord("D"), EF, ord("G"), HI]
    assert (sink.deltas[-1].finish_reason, sink.deltas[-1].stop_reason) == (FinishReason.STOP, "DEFGHI")
    assert front.send(request, *b"late") == []
    assert front.output.num_unfinished == 0


def test_stop_string_in_the_engines_last_message_needs_no_abort(front: FrontEnd) -> None:
    request, sink = front.open(stop=["EFHI"])
    assert front.finish(request, ord("x"), EF, HI, ord("y")) == []
    assert (sink.text, sink.token_ids) == ("x", [ord("x"), EF, HI])
    assert sink.completion is not None
    assert (sink.completion.finish_reason, sink.completion.stop_reason) == (FinishReason.STOP, "EFHI")


def test_stop_string_completed_by_the_very_last_token(front: FrontEnd) -> None:
    request, sink = front.open(stop=["EFHI"])
    assert front.finish(request, EF, HI) == []
    assert sink.deltas == [TokenDelta("", [EF, HI], finish_reason=FinishReason.STOP, stop_reason="EFHI")]


def test_r40_held_text_goes_out_with_the_end(front: FrontEnd) -> None:
    request, sink = front.open(stop=["own fox"])
    front.send(request, OWN_F)
    assert sink.deltas == []
    front.finish(request, EOS, reason=STOP)
    assert sink.deltas == [TokenDelta("own f", [OWN_F, EOS], finish_reason=FinishReason.STOP)]


def test_r41_empty_stop_string_is_refused(front: FrontEnd) -> None:
    with pytest.raises(InvalidParameterError, match="stop"):
        front.open(stop=[""])


def test_b58_no_stop_string_before_min_tokens(front: FrontEnd) -> None:
    request, sink = front.open(stop=["a"], min_tokens=3)
    assert front.send(request, *b"aba") == []
    assert front.send(request, *b"a") == request.engine_ids
    assert sink.text == "aba"


# ------------------------------------------------------------------------------------------------------- samples
def test_r59_n_samples_do_not_mix(front: FrontEnd) -> None:
    request, sink = front.open(n=4)
    for step in range(3):
        front.output.process(EngineCoreOutputs(request.engine_ids, [97 + 4 * step + index for index in range(4)]))
    for index, engine_id in enumerate(request.engine_ids):
        assert sink.completion is None
        front.finish(engine_id, 109 + index)
    completion = sink.completion
    assert completion is not None
    assert [sample.text for sample in completion.samples] == ["aeim", "bfjn", "cgko", "dhlp"]
    assert [sample.index for sample in completion.samples] == [0, 1, 2, 3]
    assert completion.text == "aeim"
    assert completion.usage.prompt_tokens == 2
    assert completion.usage.completion_tokens == 16
    for index in range(4):
        assert "".join(delta.text for delta in sink.deltas if delta.index == index) == completion.samples[index].text


def test_stop_string_ends_one_sample_only(front: FrontEnd) -> None:
    request, sink = front.open(n=2, stop=["b"])
    assert front.output.process(EngineCoreOutputs(request.engine_ids, [97, 98])) == [request.engine_ids[1]]
    assert sink.completion is None
    front.finish(request.engine_ids[0], *b"c")
    assert sink.completion is not None
    assert [sample.text for sample in sink.completion.samples] == ["ac", ""]


def test_single_sample_is_in_samples_too(front: FrontEnd) -> None:
    request, sink = front.open()
    front.finish(request, *b"a")
    assert sink.completion is not None
    assert [sample.text for sample in sink.completion.samples] == ["a"]
    assert "samples=[]" in repr(sink.completion.samples[0])  # no cycle


# --------------------------------------------------------------------------------------------------- identifiers
def test_r57_second_live_request_with_the_same_id_is_refused(front: FrontEnd) -> None:
    first, sink = front.open(request_id="x")
    with pytest.raises(DuplicateRequestError, match="'x'") as caught:
        front.open(request_id="x")
    assert caught.value.request_id == "x"
    front.finish(first, *b"fine")
    assert sink.text == "fine"


def test_b4_b25_r02_an_id_can_be_used_again_at_once(front: FrontEnd) -> None:
    first, first_sink = front.open(request_id="x")
    front.send(first, *b"old")
    aborted = front.output.abort("x", deliver=False)
    second, sink = front.open(request_id="x")
    assert aborted == first.engine_ids
    assert front.send(first, *b"late") == []
    front.finish(second, *b"new")
    assert (first_sink.text, sink.text) == ("old", "new")


def test_r02_abort_by_an_old_handle_leaves_the_new_request_alone(front: FrontEnd) -> None:
    front.open(request_id="x")
    old = front.output.get("x")
    assert old is not None
    front.output.abort(old, deliver=False)
    front.open(request_id="x")
    assert front.output.abort(old) == []
    assert front.output.num_unfinished == 1


# --------------------------------------------------------------------------------------------------------- abort
def test_b6_b10_abort_delivers_one_partial_completion(front: FrontEnd) -> None:
    request, sink = front.open(stop=["own fox"])
    front.send(request, *b"ab", OWN_F)
    assert front.output.abort(request.request_id) == request.engine_ids
    assert sink.deltas[-1] == TokenDelta("own f", [OWN_F], finish_reason=FinishReason.ABORT)
    assert sink.completion is not None
    assert (sink.completion.text, sink.completion.finish_reason) == ("abown f", FinishReason.ABORT)


def test_abort_without_delivery_tells_the_sink_nothing(front: FrontEnd) -> None:
    request, sink = front.open()
    front.output.abort(request.request_id, deliver=False)
    assert sink.is_open
    assert sink.deltas == []


def test_b30_abort_after_the_end_and_twice_is_harmless(front: FrontEnd) -> None:
    request, sink = front.open()
    front.finish(request, *b"a")
    assert front.output.abort(request.request_id) == []
    assert front.output.abort("never there") == []
    assert sink.completion is not None


def test_r04_abort_names_the_samples_that_are_still_there(front: FrontEnd) -> None:
    request, sink = front.open(n=4)
    front.finish(request.engine_ids[1], *b"a")
    assert front.output.abort(request.request_id) == [request.engine_ids[index] for index in (0, 2, 3)]
    assert sink.completion is not None
    assert [sample.finish_reason for sample in sink.completion.samples] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.ABORT,
    ]


def test_a_sink_may_abort_from_within_put(front: FrontEnd) -> None:
    class Impatient(RecordingSink):
        def put(self, delta: TokenDelta) -> None:
            super().put(delta)
            aborted.extend(front.output.abort("x", deliver=False))

    aborted: list[int] = []
    request = front.input.process("Hi", SamplingParams(), request_id="x")
    sink = Impatient()
    front.output.add_request(request, sink)
    assert front.send(request, *b"abc") == []
    assert sink.text == "a"
    assert aborted == request.engine_ids


# -------------------------------------------------------------------------------------------------------- errors
def test_r18_a_failing_detokenizer_fails_its_request_alone(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = [front.open() for _ in range(10)]
    broken = front.output.get(opened[3][0].request_id)
    assert broken is not None
    victim = broken.samples[0].detokenizer
    push = Detokenizer.push

    def fail(self: Detokenizer, token_id: int) -> Any:
        if self is victim:
            raise RuntimeError("broken")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", fail)
    ids = [request.engine_ids[0] for request, _ in opened]
    assert front.output.process(EngineCoreOutputs(ids, [97] * 10)) == [ids[3]]
    for index, (request, sink) in enumerate(opened):
        front.finish(request, *b"b")
        if index == 3:
            assert isinstance(sink.error, RequestFailedError)
            assert isinstance(sink.error.__cause__, RuntimeError)
            assert sink.error.request_id == request.request_id
        else:
            assert sink.text == "ab"


def test_r18_a_failing_sink_fails_its_request_alone(front: FrontEnd) -> None:
    class Broken(RecordingSink):
        def put(self, delta: TokenDelta) -> None:
            raise RuntimeError("broken")

    request = front.input.process("Hi")
    sink = Broken()
    front.output.add_request(request, sink)
    other, other_sink = front.open()
    ids = [request.engine_ids[0], other.engine_ids[0]]
    assert front.output.process(EngineCoreOutputs(ids, [97, 98])) == ids[:1]
    assert isinstance(sink.error, RequestFailedError)
    assert other_sink.text == "b"


def test_b19_a_request_that_failed_in_the_engine(front: FrontEnd) -> None:
    request, sink = front.open()
    error = ErrorInfo("ValueError", "bad logits", {}, "Traceback …")
    assert front.finish(request, reason=ERROR, error=error) == []
    assert sink.deltas == [TokenDelta("", [], finish_reason=FinishReason.ERROR)]
    assert isinstance(sink.error, RequestFailedError)
    assert "bad logits" in str(sink.error)
    other, other_sink = front.open()
    front.finish(other, *b"ok")
    assert other_sink.text == "ok"


def test_failure_of_one_sample_ends_its_siblings(front: FrontEnd) -> None:
    request, sink = front.open(n=3)
    front.output.process(EngineCoreOutputs(request.engine_ids, [97, 98, 99]))
    aborts = front.finish(request.engine_ids[1], reason=ERROR, error=ErrorInfo("RequestFailedError", "no"))
    assert aborts == [request.engine_ids[0], request.engine_ids[2]]
    assert isinstance(sink.error, RequestFailedError)
    assert front.output.num_unfinished == 0


def test_b40_engine_death_delivers_what_was_received_first(front: FrontEnd) -> None:
    opened = [front.open(stop=["own fox"]) for _ in range(3)]
    for request, _ in opened:
        front.send(request, ord("a"), OWN_F)
    dead = EngineDeadError("engine is gone", exit_code=-9)
    dead.__cause__ = RuntimeError("why")
    front.output.fail_all(dead)
    for _, sink in opened:
        assert sink.text == "aown f"
        assert isinstance(sink.error, EngineDeadError)
        assert sink.error.exit_code == -9
        assert sink.error.__cause__ is dead.__cause__
    assert len({id(sink.error) for _, sink in opened}) == 3
    assert front.output.num_unfinished == 0


def test_fail_ends_one_request(front: FrontEnd) -> None:
    request, sink = front.open()
    error = RequestFailedError("no", request_id=request.request_id)
    assert front.output.fail(request.request_id, error) == request.engine_ids
    assert sink.error is error
    assert front.output.fail(request.request_id, error) == []


# --------------------------------------------------------------------------------------------------------- usage
def test_usage(front: FrontEnd) -> None:
    request, sink = front.open()
    start = request.submitted_at
    front.now = start + 0.5
    front.send(request, *b"ab")
    front.now = start + 2.0
    front.finish(request, *b"c", num_cached_tokens=1, num_preemptions=3)
    assert sink.completion is not None
    usage = sink.completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 3, 5)
    assert (usage.cached_tokens, usage.num_preemptions) == (1, 3)
    assert usage.time_to_first_token_s == pytest.approx(0.5)
    assert usage.total_time_s == pytest.approx(2.0)


def test_times_of_the_engine_are_those_of_the_sample_with_the_first_token(front: FrontEnd) -> None:
    request, sink = front.open(n=3)
    first, second, third = request.engine_ids
    front.finish(first, reason=EngineFinishReason.ABORT, timings={first: RequestTimes(9.0)})  # it had no token
    front.send(second, *b"a", timings={second: RequestTimes(0.5, 0.25)})
    front.send(third, *b"a", timings={third: RequestTimes(1.0, 0.75)})
    front.output.abort(request.request_id)
    assert sink.usage is not None
    assert (sink.usage.queue_time_s, sink.usage.prefill_time_s) == (0.5, 0.25)


def test_usage_of_a_failed_request(front: FrontEnd) -> None:
    request, sink = front.open()
    front.now = request.submitted_at + 1.0
    front.send(request, *b"ab", num_preemptions={request.engine_ids[0]: 2})
    front.output.fail(request.request_id, RequestFailedError("no"))
    assert sink.usage is not None
    assert (sink.usage.completion_tokens, sink.usage.num_preemptions) == (2, 2)
    assert sink.usage.total_time_s == pytest.approx(1.0)


def test_cached_tokens_are_known_where_the_engine_sends_no_last_row(front: FrontEnd) -> None:
    request, sink = front.open(stop=["b"])
    front.send(request, *b"a", num_cached_tokens={request.engine_ids[0]: 2})
    front.send(request, *b"b")
    assert sink.completion is not None
    assert sink.completion.usage.cached_tokens == 2


def test_cached_tokens_of_samples_count_the_prompt_once(front: FrontEnd) -> None:
    request, sink = front.open(n=2)
    front.finish(request.engine_ids[0], *b"a", num_cached_tokens=0)
    front.finish(request.engine_ids[1], *b"a", num_cached_tokens=2, num_preemptions=1)
    assert sink.completion is not None
    assert (sink.completion.usage.cached_tokens, sink.completion.usage.num_preemptions) == (0, 1)


def test_completion_and_resubmission_data(front: FrontEnd) -> None:
    request, _ = front.open(max_tokens=7)
    front.send(request, *b"ab")
    state = front.output.get(request.request_id)
    assert state is not None
    assert (state.prompt_token_ids, state.samples[0].token_ids, state.params.max_tokens) == ([72, 105], [97, 98], 7)
    assert state.live_engine_ids == request.engine_ids


def test_b3_b24_table_is_empty_after_everything_ended(front: FrontEnd) -> None:
    opened = [front.open(n=2) for _ in range(6)]
    for request, _ in opened[:2]:
        front.output.abort(request.request_id)
    for request, _ in opened[2:4]:
        for engine_id in request.engine_ids:
            front.finish(engine_id)
    assert front.output.request_ids == [request.request_id for request, _ in opened[4:]]
    front.output.fail_all(EngineDeadError("gone"))
    assert front.output.num_unfinished == 0
    assert not front.output._samples


def test_finished_rows_without_tokens_in_the_same_message(front: FrontEnd) -> None:
    first, first_sink = front.open()
    second, second_sink = front.open()
    rows = [FinishedRequest(request.engine_ids[0], int(EngineFinishReason.LENGTH)) for request in (second, first)]
    front.output.process(EngineCoreOutputs([first.engine_ids[0]], [97], finished=rows))
    assert (first_sink.text, second_sink.text) == ("a", "")
    assert first_sink.completion is not None
    assert second_sink.completion is not None


def test_a_repetition_is_delivered_whole_and_says_so(front: FrontEnd) -> None:
    request, sink = front.open()
    front.send(request, *b"aba")
    front.finish(request, *b"b", reason=EngineFinishReason.REPETITION)
    assert (sink.text, sink.token_ids) == ("abab", [97, 98, 97, 98])
    for end in (sink.deltas[-1], sink.completion):
        assert end is not None
        assert (end.finish_reason, end.stop_reason) == (FinishReason.REPETITION, "repetition_detected")
