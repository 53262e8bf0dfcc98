"""Drafts in steps: more than one token of a row, never another token, nothing taken from anybody."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.wire.messages import EngineFinishReason, RareSampling
from asyncllm.wire.step import SchedulerOutput
from tests.support.scheduling import EOS, Engine, solo_output

LOOKUP = RareSampling(num_lookup_tokens=8)
PATTERN = [11, 12, 13, 14, 15]
DEPTHS = [1, 2, 3]


def repeating(engine: Engine, max_tokens: int = 60, *, length: int = 60, **options: Any) -> int:
    """Add a request whose output repeats a pattern; return its id."""
    return engine.add(8, max_tokens, forced=(PATTERN * 99)[:length], **{"rare": LOOKUP, **options})


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_repeated_output_takes_fewer_steps(depth: int):
    engine = Engine()
    request_id = repeating(engine)
    assert engine.run(depth=depth) < 25
    assert engine.tokens[request_id] == (PATTERN * 12)
    stats = engine.scheduler.stats()
    assert stats.num_generated_tokens == 60
    assert 35 < stats.num_accepted_drafts <= stats.num_proposed_drafts
    engine.assert_empty()


@pytest.mark.parametrize("depth", DEPTHS)
def test_wrong_drafts_change_nothing(depth: int):
    engine = Engine()
    forced = [*PATTERN * 5, 20, *PATTERN[:4], 21, *PATTERN * 4, 22, *PATTERN[1:] * 3, 23, *PATTERN * 3]
    request_id = engine.add(8, len(forced) + 4, forced=forced, rare=LOOKUP, logprobs=0)
    engine.run(depth=depth)
    right = [*forced, *solo_output_after(forced, 4)]
    assert engine.tokens[request_id] == right
    assert engine.logprobs[request_id].token_ids == right
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_drafts < stats.num_proposed_drafts


def solo_output_after(forced: list[int], num_tokens: int) -> list[int]:
    return solo_output([1000] * 8 + forced, num_tokens)


def test_a_row_with_drafts_waits_for_its_result():
    engine = Engine()
    a, b = repeating(engine), engine.add(8, 60)
    for _ in range(8):
        engine.step()
    drafted = engine.launch()
    assert drafted is not None
    assert drafted.draft_slots
    ahead = engine.launch()
    assert ahead is not None
    assert engine.scheduled(ahead) == {b: 1}
    while engine.in_air:
        engine.land()
    assert a in engine.scheduled(engine.step())


def test_with_steps_in_the_air_only_a_likely_guess_is_waited_for():
    """A request whose tokens do not repeat overlaps like any other."""
    engine = Engine()
    request_id = engine.add(8, 40, rare=LOOKUP)
    engine.scheduler.requests[request_id].token_ids[:] = range(1000, 1008)  # nor does its prompt
    engine.step()
    for _ in range(19):
        assert engine.launch() is not None
        assert engine.launch() is not None
        engine.land()
        engine.land()


@pytest.mark.parametrize(
    ("forced", "options", "reason"),
    [
        (PATTERN * 4 + PATTERN[:2] + [EOS], {}, EngineFinishReason.STOP),
        (PATTERN * 9, {"max_tokens": 28}, EngineFinishReason.LENGTH),
        (PATTERN * 4 + [11, 12, 40], {"stop_token_ids": [12], "min_tokens": 22}, EngineFinishReason.STOP),
        (PATTERN * 9, {"rare": RareSampling(num_lookup_tokens=8, repetition=(5, 5, 4))}, EngineFinishReason.REPETITION),
    ],
)
def test_an_end_within_accepted_drafts_drops_the_rest(
    forced: list[int], options: dict[str, Any], reason: EngineFinishReason
):
    found: list[list[int]] = []
    for num_drafts in (0, 8):
        engine = Engine()
        rare = options.get("rare", LOOKUP)
        rare = RareSampling(num_lookup_tokens=num_drafts, repetition=rare.repetition)
        request_id = engine.add(8, forced=forced, **{"max_tokens": 60, **options, "rare": rare})
        engine.run()
        assert engine.finished[request_id].reason == reason
        found.append(engine.tokens[request_id])
        engine.assert_empty()
    assert found[0] == found[1]
    assert engine.scheduler.stats().num_accepted_drafts > 5


def test_proposed_and_accepted_are_told_with_the_tokens():
    engine = Engine()
    request_id = repeating(engine)
    told: list[tuple[int, int]] = []
    while engine.launch() is not None:
        outputs = engine.land()
        told += [outputs.drafts[request_id]] if outputs.drafts else []
    stats = engine.scheduler.stats()
    assert told[-1] == (stats.num_proposed_drafts, stats.num_accepted_drafts)
    assert told == sorted(told)


def test_a_full_step_has_no_drafts():
    engine = Engine(lookup_step_tokens=8)
    for _ in range(5):
        repeating(engine)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.num_proposed_drafts, stats.num_generated_tokens) == (0, 300)


def test_drafts_stay_within_the_bound_of_a_step():
    engine = Engine(lookup_step_tokens=16)
    ids = [repeating(engine) for _ in range(4)]
    engine.step()
    while (step := engine.launch()) is not None:
        assert step.total_num_tokens <= 16
        engine.land()
    assert engine.scheduler.stats().num_accepted_drafts > 0
    assert all(engine.tokens[i] == PATTERN * 12 for i in ids)


def test_drafts_leave_the_budget_to_running_requests():
    engine = Engine(max_num_batched_tokens=8)
    for _ in range(4):
        repeating(engine, 30)
    while len(engine.scheduler.running) < 4 or not all(r.border for r in engine.scheduler.running):
        engine.step()
    while len(engine.scheduler.running) == 4:
        assert len(engine.step().slots) == 4


def test_drafts_take_no_block_that_a_running_request_needs():
    """Two requests that fit exactly as long as nobody takes a block ahead of time."""
    engine = Engine(num_blocks=8, block_size=4)
    a, b = repeating(engine, 8, length=8), engine.add(8, 8)
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert (engine.tokens[a], len(engine.tokens[b])) == ((PATTERN * 2)[:8], 8)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_preempted_request_keeps_what_its_drafts_gave(depth: int):
    engine = Engine()
    request_id = repeating(engine)
    for _ in range(8):
        engine.step()
    step: SchedulerOutput | None = engine.launch()
    assert step is not None
    assert step.draft_slots
    engine.scheduler.reset_prefix_cache(reset_running=True)
    num_known = len(engine.tokens[request_id])
    engine.land()
    assert len(engine.tokens[request_id]) > num_known + 1
    engine.run(depth=depth)
    assert engine.tokens[request_id] == PATTERN * 12
    engine.assert_empty()


def test_only_confirmed_tokens_are_found_in_the_prefix_cache():
    """The fake worker finds any block whose content is not that of the prefix it stands for."""
    engine = Engine(block_size=4)
    forced = PATTERN * 3 + [30, *PATTERN, 31, *PATTERN[:4], 32, *PATTERN, 33]
    first = engine.add(8, len(forced), forced=forced, rare=LOOKUP)
    engine.run()
    again = engine.add([1000] * 8 + engine.tokens[first], 4)
    engine.run()
    assert engine.scheduler.stats().prefix_hits >= len(forced) - 4
    assert engine.tokens[again] == solo_output([1000] * 8 + forced, 4)
