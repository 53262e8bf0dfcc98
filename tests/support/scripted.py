"""An AsyncLLM on a scripted engine for tests of the streams, and the check that a request left nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio

from asyncllm import AsyncLLM
from asyncllm.testing import scripted_llm

LETTERS = list(b"abcdefghijklmnopqrstuvwxyz")

ENDLESS: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}
"""Sampling of a request that does not end by itself within a test."""


@contextlib.asynccontextmanager
async def letters_llm(script: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """Yield an engine that answers the alphabet again and again, and check at the end that it holds nothing."""
    script = {"tokens": LETTERS, **(script or {})}
    async with scripted_llm(script=script, **options) as llm:
        yield llm
        if llm.healthy:
            await assert_settled(llm)


async def set_script(llm: AsyncLLM, **script: Any) -> None:
    """Play another script from now on; the alphabet unless told otherwise."""
    await llm.collective_rpc("set_script", {"tokens": LETTERS, **script})


async def assert_settled(llm: AsyncLLM) -> None:
    """Assert that no request is left anywhere: front-end table, engine table, blocks. Without a sleep."""
    assert llm.num_unfinished == 0, "in the front-end table"
    stats = await llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
    assert stats.num_free_blocks == llm.info.num_blocks, "blocks are held"


async def assert_works(llm: AsyncLLM) -> None:
    """Assert that a new request is answered in full."""
    assert (await llm.generate("next", max_tokens=5)).text == "abcde"


class cancelled_at:  # noqa: N801 - reads as a verb: await cancelled_at(k, work, cancel)
    """Run ``work``, call ``cancel`` while it is suspended for the k-th time, and count suspensions.

    Every await of the work that really suspends is such a place, also those that nobody thought of.
    """

    def __init__(self, k: int, work: Coroutine[Any, Any, Any], cancel: Callable[[], object]) -> None:
        self._k = k
        self._work = work
        self._cancel = cancel
        self.num_suspensions = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        resume: Callable[[Any], Any] = steps.send
        argument: Any = None
        while True:
            try:
                trap = resume(argument)
            except StopIteration as end:
                return end.value
            finally:
                argument = None  # an exception that knows this frame must not be known by it: nobody would free either
            self.num_suspensions += 1
            if self.num_suspensions == self._k:
                self._cancel()
            try:
                argument = yield trap
            except BaseException as error:  # passed on
                resume, argument = steps.throw, error
            else:
                resume = steps.send


async def at_every_await(
    work: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[], Awaitable[None]], max_places: int = 200
) -> int:
    """Cancel ``work()`` at its first await, then at its second …; ``check()`` after each; return their number."""
    for k in range(1, max_places):
        with anyio.CancelScope() as scope:
            place = cancelled_at(k, work(), scope.cancel)
            await place
        await check()
        if place.num_suspensions < k:
            return k - 1
    raise AssertionError(f"more than {max_places} awaits")
