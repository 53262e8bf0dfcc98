"""What holds the async facade together: the pace of bursts, and starts that several tasks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from asyncllm import EngineConfig
from asyncllm._event_loop import current_event_loop
from asyncllm._session import MAX_BURST_S, Pace, Session
from asyncllm._start import SharedStart
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support import leaks

pytestmark = pytest.mark.anyio


async def spend(pace: Pace, seconds: float) -> None:
    pace.spend(time.perf_counter() - seconds)


async def test_a_single_request_does_not_wait() -> None:
    pace = Pace()
    pace.wait().close()
    with pytest.raises(StopIteration):
        pace.wait().send(None)


async def test_after_a_burst_requests_wait_until_the_others_had_as_much_time() -> None:
    pace = Pace()
    await spend(pace, 0.025)
    began = time.perf_counter()
    await pace.wait()
    assert time.perf_counter() - began >= 2 * (0.025 - MAX_BURST_S) * 0.9


async def test_of_many_that_wait_each_gets_its_turn_in_order() -> None:
    pace = Pace()
    await spend(pace, 0.006)
    order: list[int] = []

    async def one(number: int) -> None:
        await pace.wait()
        order.append(number)
        await spend(pace, 0.001)

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(one, number)
            await anyio.wait_all_tasks_blocked()
    assert order == list(range(10))


async def test_what_was_spent_is_forgotten_with_time() -> None:
    pace = Pace()
    await spend(pace, 0.006)
    await anyio.sleep(0.02)
    began = time.perf_counter()
    await pace.wait()
    assert time.perf_counter() - began < 0.002


class Done:
    """An event that calls ``first`` in the moment in which it is set."""

    def __init__(self, first: Callable[[], object]) -> None:
        self._event = anyio.Event()
        self._first = first
        self.wait = self._event.wait
        self.is_set = self._event.is_set

    def set(self) -> None:
        self._first()
        self._event.set()


def config(folder: Path) -> EngineConfig:
    return EngineConfig.from_options(str(write_tiny_checkpoint(folder)), **scripted_options())


@pytest.mark.usefixtures("no_leaks")
async def test_a_start_that_ends_in_the_moment_of_its_cancellation_is_undone(tmp_path: Path) -> None:
    start = SharedStart(config(tmp_path), None, current_event_loop())
    with anyio.CancelScope() as scope:
        start._done = Done(scope.cancel)  # type: ignore[assignment]
        await start.wait()
    assert scope.cancelled_caught
    with anyio.fail_after(5):
        while leaks.children():  # noqa: ASYNC110 - no event announces it
            await anyio.sleep(0.005)


@pytest.mark.usefixtures("no_leaks")
async def test_a_start_that_ends_as_one_of_two_is_cancelled_belongs_to_the_other(tmp_path: Path) -> None:
    start = SharedStart(config(tmp_path), None, current_event_loop())
    scope = anyio.CancelScope()
    start._done = Done(scope.cancel)  # type: ignore[assignment]

    async def wait() -> None:
        session = await start.wait()
        session.bind()
        sessions.append(session)

    async def wait_cancelled() -> None:
        with scope:
            await start.wait()

    for first, second in ((wait, wait_cancelled), (wait_cancelled, wait)):
        sessions: list[Session] = []
        async with anyio.create_task_group() as group:
            group.start_soon(first)
            group.start_soon(second)
        assert scope.cancelled_caught
        assert await sessions[0].call("check_health") is None
        await sessions[0].aclose()
        scope = anyio.CancelScope()
        start = SharedStart(start._config, None, current_event_loop())
        start._done = Done(scope.cancel)  # type: ignore[assignment]
    start.cancel()
    with anyio.fail_after(5):
        while leaks.children():  # noqa: ASYNC110 - no event announces it
            await anyio.sleep(0.005)
