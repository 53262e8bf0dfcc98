"""Order, removal and memory of the queue of waiting requests."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncllm.core.request import Request
from asyncllm.core.request_queue import RequestQueue
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling


def request(arrival: int, priority: int = 0) -> Request:
    message = EngineCoreRequest(arrival, [1], EngineSampling(1))
    return Request(message, priority=priority, arrival=arrival, max_num_tokens=9, eos_token_ids=frozenset())


def drain(queue: RequestQueue) -> list[int]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_first_come_first_served_within_a_class():
    queue = RequestQueue()
    for arrival, priority in enumerate([1, 0, 1, 0, -1]):
        queue.add(request(arrival, priority))
    assert [one.request_id for one in queue] == [4, 1, 3, 0, 2]
    assert queue.peek().request_id == 4
    assert drain(queue) == [4, 1, 3, 0, 2]
    with pytest.raises(IndexError):
        queue.pop()


def test_r68_a_request_that_comes_back_has_its_place():
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(4)]
    for one in requests:
        queue.add(one)
    first, second = queue.pop(), queue.pop()
    queue.add(second)
    queue.add(first)
    assert drain(queue) == [0, 1, 2, 3]


def test_a_removed_request_may_come_back():
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(5)]
    for one in requests:
        queue.add(one)
    for _ in range(3):
        queue.remove(requests[1])
        queue.add(requests[1])
    queue.remove(requests[0])
    assert len(queue) == 4
    assert drain(queue) == [1, 2, 3, 4]


def test_removing_many_keeps_no_memory_of_them():
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(1000)]
    for one in requests:
        queue.add(one)
    for one in requests[:-1]:
        queue.remove(one)
    assert len(queue) == 1
    assert len(queue._heap) <= 2


def test_removing_all_of_many_is_not_quadratic():
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(20_000)]
    for one in requests:
        queue.add(one)
    begun = time.process_time()
    for one in reversed(requests):
        queue.remove(one)
    assert time.process_time() - begun < 2.0  # linear: 0.01 s
    assert not len(queue)


class QueueMachine(RuleBasedStateMachine):
    """The queue next to a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.inside: list[Request] = []
        self.outside: list[Request] = []
        self.count = 0

    @rule(priority=st.integers(0, 2))
    def add(self, priority: int) -> None:
        self.count += 1
        self.inside.append(request(self.count, priority))
        self.queue.add(self.inside[-1])

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def come_back(self, data: Any) -> None:
        one = self.outside.pop(data.draw(st.integers(0, len(self.outside) - 1)))
        self.inside.append(one)
        self.queue.add(one)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        one = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.outside.append(one)
        self.queue.remove(one)

    @precondition(lambda self: self.inside)
    @rule()
    def pop(self) -> None:
        one = min(self.inside, key=lambda one: one.urgency)
        self.inside.remove(one)
        self.outside.append(one)
        assert self.queue.peek() is one
        assert self.queue.pop() is one

    @invariant()
    def agree(self) -> None:
        assert len(self.queue) == len(self.inside)
        assert list(self.queue) == sorted(self.inside, key=lambda one: one.urgency)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
