"""The few things that differ between asyncio (uvloop too) and trio: parking a reader, a task of our own, calls from
outside.

anyio covers the rest of the package. Here its primitives would cost: a hand-off through ``anyio.Event`` takes 4-5 µs,
a bare future (asyncio) or a parked task (trio) 1-3 µs; and our reader task must not belong to any task group of the
caller.

Invariant: nothing in this module awaits except what :meth:`EventLoop.park` returns, so everything else is safe on a
cancellation path.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from asyncllm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = ["EventLoop", "Waiting", "current_event_loop", "running_event_loop"]


class Waiting(Protocol):
    """What :meth:`EventLoop.park` parks on: ``waiter`` is not ``None`` while somebody waits."""

    waiter: Any


class EventLoop(ABC):
    """One run of an event loop."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()

    def in_thread(self) -> bool:
        """Return whether the caller runs in this loop's thread."""
        return threading.get_ident() == self.thread_id

    @abstractmethod
    def is_current(self) -> bool:
        """Return whether this loop runs the caller."""

    @abstractmethod
    def is_alive(self) -> bool:
        """Return whether tasks of this loop can still run."""

    @abstractmethod
    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        """Start ``function`` as a task of nobody's; it must not raise. The caller keeps the returned reference."""

    @abstractmethod
    def run_soon(self, function: Callable[[], object]) -> bool:
        """Call ``function`` in this loop; from any thread, also from ``__del__``. ``False``: the loop is over."""

    @abstractmethod
    def park(self, waiting: Waiting) -> Awaitable[object]:
        """Return what the current task awaits at once, to be parked in ``waiting.waiter`` until :meth:`wake`.

        Cancellation ends the wait at once; whoever awaits this then has to set ``waiting.waiter`` to ``None``.
        """

    @abstractmethod
    def wake(self, waiting: Waiting) -> None:
        """Let the task in ``waiting.waiter`` go on; in this loop's thread. Nothing happens where nobody waits."""


class AsyncioLoop(EventLoop):
    """asyncio and uvloop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop

    def is_current(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def is_alive(self) -> bool:
        return self._loop.is_running()

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        return self._loop.create_task(function(), name=name)

    def run_soon(self, function: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def park(self, waiting: Waiting) -> Awaitable[object]:
        waiting.waiter = waiter = self._loop.create_future()
        return waiter

    def wake(self, waiting: Waiting) -> None:
        waiter, waiting.waiter = waiting.waiter, None
        if waiter is not None and not waiter.done() and not self._loop.is_closed():
            waiter.set_result(None)


class TrioLoop(EventLoop):
    """trio, by the primitives that its own synchronisation is built on."""

    def __init__(self, lowlevel: Any) -> None:
        super().__init__()
        self._lowlevel = lowlevel
        self._token = lowlevel.current_trio_token()
        self._over = False

    def is_current(self) -> bool:
        return self._lowlevel.in_trio_run() and self._lowlevel.current_trio_token() is self._token

    def is_alive(self) -> bool:
        return not self._over and self.run_soon(_nothing)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> object:
        return self._lowlevel.spawn_system_task(function, name=name)

    def run_soon(self, function: Callable[[], object]) -> bool:
        try:
            self._token.run_sync_soon(function)
        except RuntimeError:  # trio.RunFinishedError
            self._over = True
            return False
        return True

    def park(self, waiting: Waiting) -> Awaitable[object]:
        waiting.waiter = self._lowlevel.current_task()

        def leave(_: Any) -> Any:
            waiting.waiter = None
            return self._lowlevel.Abort.SUCCEEDED

        return self._lowlevel.wait_task_rescheduled(leave)

    def wake(self, waiting: Waiting) -> None:
        task, waiting.waiter = waiting.waiter, None
        if task is not None:
            self._lowlevel.reschedule(task)


def running_event_loop() -> EventLoop | None:
    """Return the event loop that runs in this thread, ``None`` where there is none."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():  # first: in guest mode trio runs on top of asyncio
        return TrioLoop(trio.lowlevel)
    try:
        return AsyncioLoop(asyncio.get_running_loop())
    except RuntimeError:
        return None


def current_event_loop() -> EventLoop:
    """Return the event loop that runs in this thread.

    :raises UsageError: there is none.
    """
    loop = running_event_loop()
    if loop is None:
        raise UsageError("this needs a running event loop; use asyncllm.LLM in synchronous code")
    return loop


def _nothing() -> None:
    pass
