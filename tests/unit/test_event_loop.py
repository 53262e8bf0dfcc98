"""What differs between event loops: parking and waking, tasks of nobody's, calls from outside, which loop it is."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asyncllm._event_loop import EventLoop, current_event_loop, running_event_loop
from asyncllm.errors import UsageError

pytestmark = pytest.mark.anyio


class Place:
    """Something to park on."""

    waiter: Any = None


async def test_a_parked_task_goes_on_when_it_is_woken() -> None:
    loop, place = current_event_loop(), Place()
    woken: list[bool] = []

    async def wait() -> None:
        await loop.park(place)
        woken.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        loop.wake(place)
        loop.wake(place)  # nobody waits any more
    assert woken == [True]
    assert place.waiter is None


async def test_waking_a_task_that_was_just_cancelled_is_harmless() -> None:
    loop, place = current_event_loop(), Place()

    async def wait() -> None:
        await loop.park(place)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
        loop.wake(place)


async def test_a_spawned_task_runs_beside_its_spawner() -> None:
    done = anyio.Event()

    async def work() -> None:
        done.set()

    kept = current_event_loop().spawn(work, "work")
    with anyio.fail_after(1):
        await done.wait()
    assert kept is not None


async def test_a_call_from_another_thread_runs_in_the_loop() -> None:
    loop, done = current_event_loop(), anyio.Event()
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())
        done.set()

    assert await anyio.to_thread.run_sync(loop.run_soon, note)
    with anyio.fail_after(1):
        await done.wait()
    assert threads == [threading.get_ident()]


async def test_which_loop_runs_here() -> None:
    loop = current_event_loop()
    assert loop.is_current()
    assert loop.is_alive()
    assert not await anyio.to_thread.run_sync(loop.is_current)
    assert await anyio.to_thread.run_sync(running_event_loop) is None


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_is_over(backend: str) -> None:
    async def get() -> EventLoop:
        return current_event_loop()

    loop = anyio.run(get, backend=backend)
    assert not loop.is_current()
    assert not loop.is_alive()
    assert not loop.run_soon(lambda: None)

    async def other() -> None:
        assert not loop.is_current()
        assert not loop.is_alive()

    anyio.run(other, backend=backend)


def test_without_a_loop_the_error_names_the_synchronous_face() -> None:
    assert running_event_loop() is None
    with pytest.raises(UsageError, match=r"asyncllm\.LLM"):
        current_event_loop()


def test_in_guest_mode_trio_is_the_loop_of_its_tasks() -> None:
    trio = pytest.importorskip("trio")
    kinds: list[str] = []

    async def guest() -> None:
        kinds.append(type(current_event_loop()).__name__)

    async def host() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        trio.lowlevel.start_guest_run(
            guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=lambda outcome: done.set()
        )
        await done.wait()
        kinds.append(type(current_event_loop()).__name__)

    asyncio.run(host())
    assert kinds == ["TrioLoop", "AsyncioLoop"]
