"""The waiting requests, most urgent first.

One total order serves both policies: ``Request.urgency`` is (priority class, arrival), and first come, first served is
the case of a single class. A preempted or unparked request therefore returns to its own place by itself: ahead of all
that came after it, behind nothing that did.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.core.request import Request

__all__ = ["RequestQueue"]


class RequestQueue:
    """A heap with lazy removal: ``add`` and ``pop`` O(log n), ``remove`` O(1) amortised, so aborting all n is O(n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._removed: set[Request] = set()  # still in the heap, at most half of it

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order; O(n log n)."""
        return (request for _, _, request in sorted(self._heap) if request not in self._removed)

    def add(self, request: Request) -> None:
        """Put a request, which is not in the queue, at its place."""
        if request in self._removed:
            self._removed.remove(request)
        else:
            heapq.heappush(self._heap, (*request.urgency, request))

    def peek(self) -> Request:
        """Return the most urgent request and leave it there.

        :raises IndexError: the queue is empty.
        """
        heap = self._heap
        while heap[0][2] in self._removed:
            self._removed.remove(heapq.heappop(heap)[2])
        return heap[0][2]

    def pop(self) -> Request:
        """Return the most urgent request and take it out.

        :raises IndexError: the queue is empty.
        """
        request = self.peek()
        heapq.heappop(self._heap)
        return request

    def remove(self, request: Request) -> None:
        """Take out a request, which is in the queue."""
        self._removed.add(request)
        if 2 * len(self._removed) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2] not in self._removed]
            heapq.heapify(self._heap)
            self._removed.clear()
