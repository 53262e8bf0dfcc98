"""Decode steps as recorded graphs: one per padded number of rows, the launch of a whole forward as a single call.

A model of 16 layers launches some 200 kernels per step, which costs the host more time than a small model's arithmetic
takes. A step in which each row has one new token is padded to the next recorded size. Which sizes: every power of two
up to 8, every eighth up to 256, every 16th beyond, as vLLM and nano-vLLM found good.

A graph ends with the hidden states. The head and the draw come after it: what a row asks for changes from step to step,
padding needs no logits, and the logits of all sizes together would be gigabytes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from asyncllm.worker.device_runtime import DeviceRuntime, Graph

__all__ = ["DecodeGraphs", "graph_sizes"]

LARGEST = 512  # rows; a larger step computes long enough to hide its launches


def graph_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of rows to record, smallest first; the last is ``max_num_rows``, a step's most, up to 512."""
    largest = min(max_num_rows, LARGEST)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST + 1, 16)]
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    """The recorded sizes; :meth:`replay` is valid once :meth:`capture` has returned."""

    def __init__(self, runtime: DeviceRuntime, sizes: list[int]) -> None:
        self._runtime = runtime
        self.sizes = sizes
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}

    def capture(
        self, work_of: Callable[[int], Callable[[], torch.Tensor]], report: Callable[[float], None] = lambda done: None
    ) -> None:
        """Record what ``work_of(size)`` returns, for each size; the largest first, whose memory the others share.

        The work computes hidden states [size, hidden] from static inputs, which ``work_of`` filled for a first run.
        ``report`` gets the share that is done.
        """
        for nth, size in enumerate(reversed(self.sizes), 1):
            self._graphs[size] = self._runtime.capture(work_of(size))
            report(nth / len(self.sizes))

    def size_for(self, num_rows: int) -> int | None:
        """Return the smallest recorded size that holds ``num_rows``, ``None`` if there is none."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if self._graphs and place < len(self.sizes) else None

    def replay(self, size: int) -> torch.Tensor:
        """Queue the step of ``size`` rows; return its hidden states [size, hidden], valid until the next replay."""
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def drop(self) -> None:
        """Forget the graphs and their memory."""
        self._graphs.clear()
        self._runtime.drop_graphs()
