"""Requests under a grammar in the scheduler: they wait for it, never run ahead of their tokens, and end with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from asyncllm.errors import InvalidParameterError, RequestFailedError
from asyncllm.structured.matcher import Matcher
from asyncllm.wire.messages import EngineFinishReason, Grammar, RareSampling
from tests.support.scheduling import EOS, Engine, solo_output

DEPTHS = [1, 2, 3]
WAITS: dict[str, Any] = {"rare": RareSampling(grammar=Grammar("regex", "regex", "a"))}


class Spelling:
    """A grammar of one output; its masks say how many tokens were followed."""

    def __init__(self, token_ids: Sequence[int], *, ends: bool = True) -> None:
        self.left = list(token_ids)
        self.ends = ends
        self.num_followed = 0
        self.is_shortened = False

    @property
    def mask(self) -> bytes:
        return bytes([self.num_followed])

    def follow(self, token_id: int, num_left: int) -> bool:
        if not self.left or self.left.pop(0) != token_id:
            raise RequestFailedError("it does not fit")
        self.num_followed += 1
        return self.ends and not self.left


def add(engine: Engine, token_ids: Sequence[int], prompt: int = 8, *, ready: bool = True, **options: Any) -> int:
    """Add a request that draws ``token_ids``, under a grammar of just these."""
    ends = options.pop("ends", True)
    request_id = engine.add(prompt, **{"max_tokens": 50, "forced": token_ids, **WAITS, **options})
    if ready:
        set_grammar(engine, request_id, Spelling(token_ids, ends=ends))
    return request_id


def set_grammar(engine: Engine, request_id: int, matcher: Spelling) -> None:
    engine.scheduler.set_grammar(request_id, cast("Matcher", matcher))
    engine.scheduler.check_integrity()


# ---------------------------------------------------------------------------------------------------- until it is there
def test_a_request_waits_for_its_grammar_and_others_go_on() -> None:
    engine = Engine()
    waits = add(engine, [11, 12], ready=False)
    other = engine.add(8, max_tokens=3)
    engine.run()
    assert engine.tokens == {waits: [], other: solo_output([1001] * 8, 3)}
    assert (engine.scheduler.stats().num_waiting, engine.scheduler.has_work()) == (1, False)
    set_grammar(engine, waits, Spelling([11, 12]))
    engine.run()
    assert engine.tokens[waits] == [11, 12]
    engine.assert_empty()


def test_it_keeps_its_place_in_the_queue() -> None:
    engine = Engine(max_num_seqs=1)
    first = add(engine, [11], ready=False)
    second, third = engine.add(8, max_tokens=2), engine.add(8, max_tokens=2)
    engine.step()
    set_grammar(engine, first, Spelling([11]))
    engine.run()
    assert list(engine.finished) == [second, first, third]


def test_a_grammar_that_is_refused_is_the_end_of_that_request_alone() -> None:
    engine = Engine()
    bad, other = add(engine, [11], ready=False), engine.add(8, max_tokens=3)
    engine.scheduler.set_grammar(bad, InvalidParameterError("no", parameter="regex"))
    engine.run()
    assert engine.finished[bad].reason == EngineFinishReason.ERROR
    error = engine.finished[bad].error
    assert error is not None
    assert (error.kind, error.fields["parameter"]) == ("InvalidParameterError", "regex")
    assert engine.tokens[other] == solo_output([1001] * 8, 3)
    engine.assert_empty()


@pytest.mark.parametrize("parked", [False, True])
def test_a_request_may_be_dropped_while_it_waits(parked: bool) -> None:
    engine = Engine()
    request_id = add(engine, [11], ready=False)
    engine.scheduler.park_requests([request_id], parked)
    engine.scheduler.check_integrity()
    engine.scheduler.abort_requests([request_id])
    set_grammar(engine, request_id, Spelling([11]))  # comes too late
    assert not engine.scheduler.has_work()
    engine.assert_empty()


def test_parking_and_the_grammar_are_waited_for_both() -> None:
    engine = Engine()
    request_id = add(engine, [11], ready=False)
    for parked in (True, False, True):
        engine.scheduler.park_requests([request_id], parked)
        engine.scheduler.check_integrity()
    set_grammar(engine, request_id, Spelling([11]))
    assert engine.launch() is None
    engine.scheduler.park_requests([request_id], False)
    engine.run()
    assert engine.tokens[request_id] == [11]


# -------------------------------------------------------------------------------------------------------- while it runs
@pytest.mark.parametrize("depth", DEPTHS)
def test_each_token_is_drawn_under_the_mask_of_those_before_it(depth: int) -> None:
    engine = Engine()
    request_id, other = add(engine, [11, 12, 13]), engine.add(8, max_tokens=9)
    masks: list[dict[int, bytes]] = []
    while engine.scheduler.has_work() or engine.in_air:
        while len(engine.in_air) < depth and (step := engine.launch()) is not None:
            masks.append(step.masks)
        engine.land()
    assert [list(mask.values()) for mask in masks if mask] == [[b"\0"], [b"\1"], [b"\2"]]
    assert engine.tokens == {request_id: [11, 12, 13], other: solo_output([1001] * 8, 9)}
    assert engine.worker.num_drawn == 12 + depth - 1 - (depth - 1), "nothing of it is drawn ahead"
    engine.assert_empty()


def test_only_rows_that_draw_have_a_mask() -> None:
    engine = Engine(max_num_batched_tokens=5)
    request_id = add(engine, [11], prompt=12)
    steps = [engine.step() for _ in range(3)]
    assert [len(step.masks) for step in steps] == [0, 0, 1]
    assert engine.finished[request_id].reason == EngineFinishReason.COMPLETE


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_grammar_outlives_preemptions(depth: int) -> None:
    """With blocks for one and a half of them, and outputs over many blocks."""
    engine = Engine(num_blocks=9, block_size=4, enable_prefix_caching=False)
    outputs = {add(engine, range(11 + i, 31 + i)): list(range(11 + i, 31 + i)) for i in range(3)}
    engine.run(depth=depth)
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.tokens == outputs
    assert {row.reason for row in engine.finished.values()} == {EngineFinishReason.COMPLETE}
    engine.assert_empty()


# -------------------------------------------------------------------------------------------------------------- the end
def test_the_end_of_the_grammar_ends_the_request_also_before_min_tokens() -> None:
    engine = Engine()
    request_id = add(engine, [11, 12], min_tokens=10)
    engine.run()
    assert engine.finished[request_id].reason == EngineFinishReason.COMPLETE


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_of_sequence_where_the_grammar_may_end(ignore_eos: bool) -> None:
    engine = Engine()
    request_id = add(engine, [11, EOS], ends=False, ignore_eos=ignore_eos)
    engine.run()
    row = engine.finished[request_id]
    assert (row.reason, row.stop_token_id) == (EngineFinishReason.STOP, None)


def test_a_whole_output_is_not_cut_off_at_its_last_token() -> None:
    engine = Engine()
    whole, cut = add(engine, [11, 12], max_tokens=2), add(engine, [11, 12, 13], max_tokens=2)
    engine.run()
    assert engine.finished[whole].reason == EngineFinishReason.COMPLETE
    assert engine.finished[cut].reason == EngineFinishReason.LENGTH


def test_a_token_against_the_grammar_fails_that_request_alone() -> None:
    engine = Engine()
    bad, other = add(engine, [11, 12]), add(engine, [11, 12])
    engine.worker.forced[bad] = [11, 13]
    engine.run()
    assert engine.finished[bad].reason == EngineFinishReason.ERROR
    assert engine.finished[other].reason == EngineFinishReason.COMPLETE
    engine.assert_empty()


def test_the_worker_is_not_told_of_the_grammar() -> None:
    engine = Engine()
    add(engine, [11])
    [new] = engine.step().new_requests
    assert new.sampling.rare == RareSampling()
