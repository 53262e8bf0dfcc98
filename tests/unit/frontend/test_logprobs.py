"""Logprob columns become candidates with text, aligned with the ids of each item."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncllm.errors import RequestFailedError
from asyncllm.wire.messages import LogprobRows
from tests.support.frontend import FrontEnd

if TYPE_CHECKING:
    from asyncllm.frontend.input_processor import ProcessedRequest

EURO = list("€".encode())


@pytest.fixture
def front(tmp_path: Path) -> FrontEnd:
    return FrontEnd(tmp_path, pieces=[b"a\xe2", " word"])


def rows(*positions: list[int]) -> LogprobRows:
    """Return rows whose candidates are ``positions``; logprob and rank follow from the place."""
    flat = [token_id for position in positions for token_id in position]
    width = len(positions[0])
    return LogprobRows(
        width,
        flat,
        [-0.5 * (index % width) - 0.25 for index in range(len(flat))],
        [1 + index % width for index in range(len(flat))],
    )


def logprobs(request: ProcessedRequest, *positions: list[int]) -> dict[int, LogprobRows]:
    return {request.engine_ids[0]: rows(*positions)}


def test_b95_chosen_first_then_the_most_likely(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=2)
    front.send(request, 97, logprobs=logprobs(request, [97, 98, 99]))
    found = sink.deltas[0].logprobs
    assert found is not None
    assert len(found) == 1
    assert (found[0].chosen.token_id, found[0].chosen.text, found[0].chosen.rank) == (97, "a", 1)
    assert [(top.token_id, top.text, top.logprob) for top in found[0].top] == [(98, "b", -0.75), (99, "c", -1.25)]


def test_logprobs_zero_reports_the_chosen_one_only(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=0)
    front.send(request, 97, logprobs=logprobs(request, [97]))
    assert sink.deltas[0].logprobs is not None
    assert sink.deltas[0].logprobs[0].top == []


def test_without_asking_there_are_none(front: FrontEnd) -> None:
    request, sink = front.open()
    front.finish(request, 97)
    assert sink.deltas[0].logprobs is None
    assert sink.completion is not None
    assert sink.completion.logprobs is None
    assert sink.completion.prompt_logprobs is None


def test_r61_as_many_logprobs_as_ids_in_each_item(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=0, stop=["stop!"])
    ids = [*b"ok", *EURO, *b"sto", 97]
    front.send(request, *ids[:4], logprobs=logprobs(request, *([token_id] for token_id in ids[:4])))
    front.send(request, *ids[4:6], logprobs=logprobs(request, *([token_id] for token_id in ids[4:6])))
    front.finish(request, *ids[6:], logprobs=logprobs(request, *([token_id] for token_id in ids[6:])))
    for delta in sink.deltas:
        assert delta.logprobs is not None
        assert [found.chosen.token_id for found in delta.logprobs] == delta.token_ids
    assert sink.token_ids == ids
    assert sink.completion is not None
    assert sink.completion.logprobs is not None
    assert [found.chosen.token_id for found in sink.completion.logprobs] == ids


def test_b95_texts_never_end_in_a_replacement(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=2)
    for token_id in EURO:
        front.send(request, token_id, logprobs=logprobs(request, [token_id, 0xFF, 260]))
    assert sink.deltas[0].logprobs is not None
    texts = [found.chosen.text for found in sink.deltas[0].logprobs]
    assert texts == ["", "", "€"]  # the last byte completes the character
    for found in sink.deltas[0].logprobs:
        assert not any((top.text or "").endswith("\ufffd") for top in found.top)
    assert sink.deltas[0].logprobs[0].top[1].text == "a"


def test_special_tokens_are_spelled_out(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=1)
    front.send(request, 97, logprobs=logprobs(request, [97, 256]))
    assert sink.deltas[0].logprobs is not None
    assert sink.deltas[0].logprobs[0].top[0].text == "<|endoftext|>"


def test_b103_detokenize_false_has_no_texts(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=0, prompt_logprobs=0, detokenize=False)
    front.finish(request, 97, logprobs=logprobs(request, [97]), prompt_logprobs=logprobs(request, [105]))
    assert sink.deltas[0].logprobs is not None
    assert sink.deltas[0].logprobs[0].chosen.text is None
    assert sink.completion is not None
    assert sink.completion.prompt_logprobs is not None
    assert sink.completion.prompt_logprobs[1] is not None
    assert sink.completion.prompt_logprobs[1].chosen.text is None


def test_r60_prompt_logprobs_arrive_in_parts(front: FrontEnd) -> None:
    request, sink = front.open([*b"x", *EURO, *b"y"], prompt_logprobs=0)
    front.send(request, prompt_logprobs=logprobs(request, [EURO[0]], [EURO[1]]))
    front.send(request, prompt_logprobs=logprobs(request, [EURO[2]], [ord("y")]))
    front.finish(request, 97)
    assert sink.completion is not None
    found = sink.completion.prompt_logprobs
    assert found is not None
    assert len(found) == 5
    assert found[0] is None
    assert [one.chosen.token_id for one in found[1:] if one] == [*EURO, ord("y")]
    assert [one.chosen.text for one in found[1:] if one] == ["", "", "€", "y"]


def test_prompt_logprobs_of_several_samples_are_those_of_the_first(front: FrontEnd) -> None:
    request, sink = front.open(prompt_logprobs=0, n=2)
    front.finish(request.engine_ids[0], 97, prompt_logprobs={request.engine_ids[0]: rows([105])})
    front.finish(request.engine_ids[1], 98)
    assert sink.completion is not None
    for sample in sink.completion.samples:
        assert sample.prompt_logprobs is not None
        assert len(sample.prompt_logprobs) == 2


def test_a_token_without_the_logprobs_asked_for_fails_its_request(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=1)
    assert front.send(request, 97) == request.engine_ids
    assert isinstance(sink.error, RequestFailedError)
    assert "without the logprobs" in str(sink.error)


def test_requested_tokens_are_told_from_the_most_likely(front: FrontEnd) -> None:
    request, sink = front.open(logprobs=1, logprob_token_ids=[99, 100])
    front.finish(request, 97, logprobs=logprobs(request, [97, 98, 99, 100]))
    assert sink.completion is not None
    for found in (sink.deltas[0].logprobs, sink.completion.logprobs):
        assert found is not None
        assert [top.token_id for top in found[0].top] == [98]
        assert [(one.token_id, one.text, one.rank) for one in found[0].requested] == [(99, "c", 3), (100, "d", 4)]


def test_requested_tokens_alone_need_no_logprobs(front: FrontEnd) -> None:
    request, sink = front.open(logprob_token_ids=[98])
    front.send(request, 97, logprobs=logprobs(request, [97, 98]))
    [found] = sink.deltas[0].logprobs or []
    assert (found.chosen.token_id, found.top, [one.token_id for one in found.requested]) == (97, [], [98])
