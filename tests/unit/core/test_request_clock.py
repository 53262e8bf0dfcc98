"""The engine's times of a request, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterable

from asyncllm.core.request_clock import RequestClock
from asyncllm.wire.messages import EngineCoreOutputs, EngineFinishReason, EngineSampling, FinishedRequest, RequestTimes
from asyncllm.wire.step import NewRequest


class Times:
    """A request clock, and what it tells."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = RequestClock(lambda: self.now)

    def schedule(self, *request_ids: int) -> None:
        self.clock.schedule([NewRequest(0, i, [1], 1, 0, [0], EngineSampling(5)) for i in request_ids])

    def stamp(self, request_ids: Iterable[int] = (), finished: Iterable[int] = ()) -> dict[int, RequestTimes]:
        ids = list(request_ids)
        rows = [FinishedRequest(i, EngineFinishReason.ABORT) for i in finished]
        outputs = EngineCoreOutputs(ids, [7] * len(ids), rows)
        self.clock.stamp(outputs)
        return outputs.timings


def test_queue_and_prefill_are_told_with_the_first_token_and_never_again() -> None:
    times = Times()
    times.clock.add(1)
    times.now += 2
    times.schedule(1)
    times.now += 3
    assert times.stamp() == {}  # a chunk
    times.now += 4
    assert times.stamp([1]) == {1: RequestTimes(2, 7)}
    assert times.stamp([1]) == {}
    assert len(times.clock) == 0


def test_a_step_tells_the_first_tokens_among_others() -> None:
    times = Times()
    for request_id in (1, 2, 3):
        times.clock.add(request_id)
    times.schedule(1, 2)
    times.now += 1
    assert times.stamp([9, 2, 8]) == {2: RequestTimes(0, 1)}
    times.now += 1
    times.schedule(3)
    assert times.stamp([3, 1]) == {1: RequestTimes(0, 2), 3: RequestTimes(2, 0)}


def test_a_preemption_before_the_first_token_is_part_of_the_prefill() -> None:
    times = Times()
    times.clock.add(1)
    times.schedule(1)
    times.now += 5
    times.schedule(1)  # back after a preemption
    times.now += 1
    assert times.stamp([1]) == {1: RequestTimes(0, 6)}


def test_an_end_without_a_token_has_the_queue_time_if_a_step_took_it_in() -> None:
    times = Times()
    times.clock.add(1)
    times.clock.add(2)
    times.now += 2
    times.schedule(1)
    assert times.stamp(finished=[1, 2]) == {1: RequestTimes(2)}
    assert len(times.clock) == 0


def test_one_token_that_is_also_the_last() -> None:
    times = Times()
    times.clock.add(1)
    times.schedule(1)
    times.now += 1
    assert times.stamp([1], finished=[1]) == {1: RequestTimes(0, 1)}


def test_aborted_requests_are_forgotten() -> None:
    times = Times()
    times.clock.add(1)
    times.clock.add(2)
    times.schedule(2)
    times.clock.drop([1, 2, 3])
    assert len(times.clock) == 0
    assert times.stamp([2]) == {}
