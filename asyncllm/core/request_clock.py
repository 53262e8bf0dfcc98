"""When each request came, was first taken into a step and got its first token: the engine's half of a request's times.

The scheduler has no clock, so the engine core calls this beside it. Only durations leave it, in
:attr:`~asyncllm.wire.messages.EngineCoreOutputs.timings`: the clocks of two machines are not the same.

    added ──── queue ────► in a step ──── prefill ────► first token: told, forgotten       dropped, ended: forgotten

Invariant: only requests without a token are kept, so a step in which all have one costs two looks at empty tables.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncllm.wire.messages import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncllm.wire.messages import EngineCoreOutputs
    from asyncllm.wire.step import NewRequest

__all__ = ["RequestClock"]


class RequestClock:
    """The times of requests that have no token yet. ``clock`` counts seconds from anywhere."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._added_at: dict[int, float] = {}  # of those that no step has taken in
        self._prefills: dict[int, tuple[float, float]] = {}  # of the others: queue time, when the step was made

    def __len__(self) -> int:
        return len(self._added_at) + len(self._prefills)

    def add(self, request_id: int) -> None:
        """Note that a request has come."""
        self._added_at[request_id] = self._clock()

    def drop(self, request_ids: Iterable[int]) -> None:
        """Forget aborted requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._added_at.pop(request_id, None)
            self._prefills.pop(request_id, None)

    def schedule(self, new_requests: Iterable[NewRequest]) -> None:
        """Note that a step takes requests in; one that comes back after a preemption has its queue time already."""
        now = self._clock()
        for row in new_requests:
            added_at = self._added_at.pop(row.request_id, None)
            if added_at is not None:
                self._prefills[row.request_id] = now - added_at, now

    def stamp(self, outputs: EngineCoreOutputs) -> None:
        """Add the times of requests whose first token, or whose end without one, is in ``outputs``."""
        if self._prefills and not self._prefills.keys().isdisjoint(outputs.request_ids):
            now = self._clock()
            for request_id in self._prefills.keys() & set(outputs.request_ids):
                queue_s, started_at = self._prefills.pop(request_id)
                outputs.timings[request_id] = RequestTimes(queue_s, now - started_at)
        for row in outputs.finished:
            self._added_at.pop(row.request_id, None)
            if (prefill := self._prefills.pop(row.request_id, None)) is not None:
                outputs.timings[row.request_id] = RequestTimes(prefill[0])
