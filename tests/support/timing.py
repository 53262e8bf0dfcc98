"""Time limits on a machine that others use too: a pause of the machine spoils one round, a fault every round."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable


async def best_of(measure: Callable[[], Awaitable[float]], limit: float, rounds: int = 3) -> float:
    """Return the first figure of ``measure()`` that keeps ``limit``, or the smallest of ``rounds``."""
    best = math.inf
    for _ in range(rounds):
        best = min(best, await measure())
        if best <= limit:
            break
    return best


def percentile(figures: list[float], share: float) -> float:
    """Return the smallest figure that at least ``share`` of the figures do not exceed."""
    return sorted(figures)[math.ceil(len(figures) * share) - 1]


def cpu_s(pid: int) -> float:
    """Return the processor time of a living process, to the nanosecond; the counters in ``/proc`` tick in 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a process id
