"""Outputs that end in a pattern several times in a row end their request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asyncllm.core.repetition import RepetitionWatch
from asyncllm.wire.messages import EngineCoreRequest, EngineFinishReason, EngineSampling, RareSampling
from tests.support.scheduling import Engine


def ends_repeated(tokens: list[int], min_size: int, max_size: int, min_count: int) -> bool:
    """Say the same by writing every pattern out."""
    return any(
        len(tokens) >= size * min_count and tokens[-size * min_count :] == tokens[-size:] * min_count
        for size in range(min_size, max_size + 1)
    )


@pytest.mark.parametrize("limits", [(1, 1, 2), (1, 3, 3), (2, 5, 2), (3, 3, 4), (1, 8, 5), (6, 9, 2)])
def test_what_is_found_is_what_is_there(limits: tuple[int, int, int]) -> None:
    """Of few different tokens, so that patterns are frequent, and with whole patterns thrown in."""
    chance = random.Random(sum(limits))
    num_found = 0
    for _ in range(60):
        tokens = [1, 1, 1]  # a prompt
        watch = RepetitionWatch(*limits, start=3)
        while len(tokens) < 90:
            pattern = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
            for token in pattern * chance.choice((1, 1, 2, 5)):
                tokens.append(token)
                expected = ends_repeated(tokens[3:], *limits)
                assert watch.repeats(tokens) == expected, tokens
                num_found += expected
    assert num_found > 20


def test_tokens_may_come_several_at_once() -> None:
    watch = RepetitionWatch(1, 4, 3, start=1)
    assert not watch.repeats([9, 1, 2, 1, 2])
    assert not watch.repeats([9, 1, 2, 1, 2])
    assert watch.repeats([9, 1, 2, 1, 2, 1, 2])
    assert not watch.repeats([9, 1, 2, 1, 2, 1, 2, 1, 2, 5])


def run(forced: list[int], **fields: Any) -> tuple[list[int], int]:
    """Return the tokens and the reason of a request to whom the model says ``forced``."""
    engine = Engine()
    request = EngineCoreRequest(0, [11, 12, 11, 12, 11, 12], EngineSampling(**{"max_tokens": 40, **fields}))
    engine.tokens[0] = []
    engine.worker.forced[0] = forced
    engine.scheduler.add_request(request)
    engine.run()
    return engine.tokens[0], engine.finished[0].reason


PATTERN = [11, 12] * 20
WATCHED = RareSampling(repetition=(1, 6, 3))


def test_a_repetition_ends_the_request_with_its_tokens() -> None:
    assert run(PATTERN, rare=WATCHED) == ([11, 12, 11, 12, 11, 12], EngineFinishReason.REPETITION)
    assert run(PATTERN) == (PATTERN, EngineFinishReason.LENGTH)


def test_a_repetition_waits_for_min_tokens() -> None:
    assert run(PATTERN, rare=WATCHED, min_tokens=9) == (PATTERN[:9], EngineFinishReason.REPETITION)


def test_other_ends_come_first() -> None:
    assert run(PATTERN, rare=WATCHED, max_tokens=6) == (PATTERN[:6], EngineFinishReason.LENGTH)
    assert run(PATTERN, rare=WATCHED, stop_token_ids=[12]) == ([11, 12], EngineFinishReason.STOP)


def test_a_repetition_is_found_across_a_preemption() -> None:
    engine = Engine(num_blocks=8, block_size=4)
    engine.add(8, max_tokens=24)
    forced = [*range(20, 28), *PATTERN]
    watched = engine.add(8, max_tokens=24, forced=forced, rare=RareSampling(repetition=(2, 2, 4)))
    engine.run()
    assert engine.finished[watched].num_preemptions > 0
    assert engine.tokens[watched] == forced[:16]
    assert engine.finished[watched].reason == EngineFinishReason.REPETITION
