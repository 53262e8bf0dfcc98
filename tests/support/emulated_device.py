"""A device with memory of its own and recorded graphs, on the CPU: what a GPU makes of the runner, with real numbers.

What is not kept to here would go wrong on a GPU without a word: a staging block is poisoned as soon as it was copied, a
download is made as late as can be, a graph repeats the recorded operations on the same memory whatever Python would do
by now, and an operation that would make the host wait for the device raises :class:`HostSync` while a graph is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from asyncllm.worker.device_runtime import DONE, CpuRuntime, Download, Event, Graph, Staging

T = TypeVar("T")

SYNCHRONIZING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_unique2",
    "aten::unique_consecutive",
}
POISON = 0x7B  # as int32 or int64 a place far outside of any buffer


class HostSync(RuntimeError):
    """The host would have waited for the device."""


class Recorder(TorchDispatchMode):
    """Notes every operation with the tensors that it was given and that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        masks = [
            a for a in tree_flatten((args[1:], kwargs))[0] if isinstance(a, torch.Tensor) and a.dtype == torch.bool
        ]
        if name in SYNCHRONIZING or (name == "aten::index" and masks):
            raise HostSync(name)
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        return found


class RecordedGraph:
    def __init__(self, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
        self.calls = calls

    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            again = func(*args, **kwargs)
            for new, old in zip(tree_flatten(again)[0], tree_flatten(found)[0], strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class Late:
    """Copies that are made when somebody waits for them: a second stream may be as slow as that."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._tensors]


class EmulatedRuntime(CpuRuntime):
    """``num_replays`` and ``num_copies`` count what was done."""

    shares_memory = False
    num_stages = 2
    can_capture = True

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = self.num_uploads = self.num_replays = 0
        self.graphs: list[RecordedGraph] = []

    def device_block(self, staging: Staging) -> torch.Tensor:
        return torch.full_like(staging.tensor, POISON)

    def copy(self, staging: Staging, block: torch.Tensor) -> Event:
        self.num_copies += 1
        block.copy_(staging.tensor)
        staging.tensor.fill_(POISON)
        return DONE

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        self.num_uploads += 1
        return torch.from_numpy(array.copy())

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return Late(tensors)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        work()
        with Recorder() as recorder:
            output = work()
        graph = RecordedGraph(recorder.calls)
        self.graphs.append(graph)
        runtime = self

        class Counted:
            def replay(self) -> None:
                runtime.num_replays += 1
                graph.replay()

        return Counted(), output
