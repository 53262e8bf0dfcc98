"""Cancel the start and the end of an engine at each of their awaits: no process, socket, thread or file is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncllm import AsyncLLM, EngineConfig
from asyncllm.errors import UsageError
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support import leaks
from tests.support.scripted import LETTERS, cancelled_at

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig.from_options(str(write_tiny_checkpoint(tmp_path)), **scripted_options(tokens=LETTERS))


async def gone(llm: AsyncLLM) -> None:
    """Wait for what the background has to clear away after a start was given up."""
    with anyio.fail_after(5):
        while leaks.children():  # noqa: ASYNC110 - no event announces it
            await anyio.sleep(0.005)
    assert not llm.healthy
    assert llm.engine_pid is None


async def work_after(llm: AsyncLLM) -> None:
    """Assert that the object can be used as if nothing had happened, and end it."""
    async with llm:
        assert (await llm.generate("x", max_tokens=3)).text == "abc"


async def test_starting_cancelled_at_its_await(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    with anyio.CancelScope() as scope:
        await cancelled_at(1, llm.start(), scope.cancel)
    await gone(llm)
    await work_after(llm)


async def test_starting_cancelled_in_each_phase(config: EngineConfig) -> None:
    phases: list[str] = []
    llm = AsyncLLM(config, on_progress=lambda phase, fraction: phases.append(phase))
    async with llm:
        pass
    assert phases
    for phase in phases:
        with anyio.CancelScope() as scope:
            llm = AsyncLLM(config, on_progress=_cancel_in(phase, scope))
            await llm.start()
        assert scope.cancelled_caught
        await gone(llm)


def _cancel_in(phase: str, scope: anyio.CancelScope) -> Callable[[str, float | None], None]:
    return lambda now, fraction: scope.cancel() if now == phase else None


async def test_a_lazy_start_by_a_stream_cancelled_at_each_await(config: EngineConfig) -> None:
    llm = AsyncLLM(config)

    async def read() -> None:
        async for _ in llm.stream("x", max_tokens=3):
            pass

    for k in range(1, 50):
        with anyio.CancelScope() as scope:
            place = cancelled_at(k, read(), scope.cancel)
            await place
        if place.num_suspensions < k:
            break
        await llm.aclose()
        await gone(llm)
        llm = AsyncLLM(config)
    assert k >= 3
    assert llm.num_unfinished == 0
    await llm.aclose()


async def test_of_two_starters_the_cancelled_one_leaves_the_start_to_the_other(config: EngineConfig) -> None:
    llm = AsyncLLM(config)

    async def start() -> None:
        await llm.start()
        started.append(llm.engine_pid)

    started: list[int | None] = []
    async with anyio.create_task_group() as group:
        group.start_soon(start)
        group.start_soon(start)
        with anyio.CancelScope() as scope:
            await cancelled_at(1, llm.start(), scope.cancel)
    assert len(started) == 2
    assert len(leaks.children()) == 1
    await llm.aclose()


async def test_all_starters_cancelled_end_the_start(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    async with anyio.create_task_group() as group:
        group.start_soon(llm.start)
        group.start_soon(llm.start)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    await gone(llm)
    await work_after(llm)


async def test_closing_while_it_starts(config: EngineConfig) -> None:
    llm = AsyncLLM(config)

    async def start() -> None:
        with pytest.raises(UsageError, match="closed while it was starting"):
            await llm.start()

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await anyio.wait_all_tasks_blocked()
        await llm.aclose()
    await gone(llm)


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(config)
    await llm.start()
    yield llm
    await gone(llm)


async def test_closing_cancelled_at_each_await(config: EngineConfig) -> None:
    for k in range(1, 50):
        async with running(config) as llm:
            stream = llm.stream("x")
            with anyio.CancelScope() as scope:
                place = cancelled_at(k, llm.aclose(), scope.cancel)
                await place
            await stream.completion()
        if place.num_suspensions < k:
            break
    assert k >= 2


async def test_leaving_the_with_block_by_cancellation(config: EngineConfig) -> None:
    with anyio.CancelScope() as scope:
        async with AsyncLLM(config) as llm:
            stream = llm.stream("x", ignore_eos=True)
            await anext(stream)
            scope.cancel()
            await stream.completion()
    assert scope.cancelled_caught
    await gone(llm)


async def close_and_cancel(llm: AsyncLLM) -> None:
    task = asyncio.current_task()
    assert task is not None
    await cancelled_at(1, llm.aclose(), task.cancel)


async def test_task_cancel_of_asyncio_while_closing(anyio_backend: Any, config: EngineConfig) -> None:
    if anyio_backend[0] != "asyncio":
        pytest.skip("asyncio's own way to cancel")
    async with running(config) as llm:
        task: asyncio.Task[None] = asyncio.create_task(close_and_cancel(llm))
        await asyncio.wait([task])
        assert task.cancelled()


async def test_closing_while_starting_waits_until_nothing_is_left(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            with pytest.raises(UsageError, match="closed"):
                await llm.start()

        tasks.start_soon(start)
        with anyio.fail_after(5):
            while not leaks.children():  # noqa: ASYNC110 - no event announces it
                await anyio.sleep(0.001)
        await llm.aclose()
        assert not leaks.children()
    await work_after(llm)


async def test_of_two_that_close_both_wait_for_the_end(config: EngineConfig) -> None:
    llm = AsyncLLM(config)
    await llm.start()

    async def close() -> None:
        await llm.aclose()
        assert not leaks.children()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        tasks.start_soon(close)
    await llm.aclose()
    await work_after(llm)
