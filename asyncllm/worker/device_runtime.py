"""What the worker asks of its device besides arithmetic: memory to copy from and to, events, graphs, free memory.

The only file that calls :mod:`torch.cuda`. The rest of the worker is written as for a GPU, where work is queued and
the host goes on: nothing between the packed copy of a step's inputs and :meth:`Download.wait` waits for the device. On
a CPU the same calls have nothing to wait for and copy nothing.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say what from_numpy takes and numpy returns)

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from asyncllm.platforms.cpu import available_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

__all__ = ["CpuRuntime", "CudaRuntime", "DeviceRuntime", "Download", "Event", "Graph", "Staging", "make_runtime"]

T = TypeVar("T")


class Event(Protocol):
    """A point in the device's queue."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        ...


class Download(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for them and return them in host memory, in order."""
        ...


class Graph(Protocol):
    """Recorded work of the device."""

    def replay(self) -> None:
        """Queue the work again, on whatever its static inputs hold by then."""
        ...


class Staging(NamedTuple):
    """A block of host memory, for the device and for the host."""

    tensor: torch.Tensor  # [num_bytes] uint8
    array: npt.NDArray[np.uint8]  # the same memory


class DeviceRuntime(ABC):
    """One device and its queue of work. Used by the worker's thread only.

    ``shares_memory``: whether the host's memory is the device's own. ``num_stages``: staging blocks that the host needs
    to write one step's inputs while those of an earlier one are still being copied. ``can_capture``: whether
    :meth:`capture` saves time in replays.
    """

    shares_memory: bool
    num_stages: int
    can_capture: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which the thread's work goes to this device."""
        return nullcontext()

    @abstractmethod
    def staging(self, num_bytes: int) -> Staging:
        """Return zeroed host memory that the device can copy from on its own."""

    @abstractmethod
    def device_block(self, staging: Staging) -> torch.Tensor:
        """Return device memory for what is staged in ``staging``; on a CPU that is ``staging`` itself."""

    @abstractmethod
    def copy(self, staging: Staging, block: torch.Tensor) -> Event:
        """Queue the copy of ``staging`` to ``block``; return the point after which the host may write there again."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return ``array`` on the device, without waiting. On a CPU it shares the memory, so nobody may change it."""

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Queue the copies of ``tensors`` to the host, in order with the work queued so far."""

    @abstractmethod
    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Record ``work`` and return its graph and what it returned: tensors that each replay fills again.

        ``work`` is run before, so that what happens once (compilation, workspaces) is not recorded. All graphs of a
        runtime share one pool of memory, except for what they return: it is valid until another is replayed.
        """

    @abstractmethod
    def drop_graphs(self) -> None:
        """Give back the memory that captured graphs shared; they must not be replayed again."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    @abstractmethod
    def memory_info(self) -> tuple[int, int]:
        """Return free and total memory of the device in bytes."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the memory of the device that tensors of this process hold, in bytes."""

    @abstractmethod
    def peak_allocated_bytes(self) -> int:
        """Return the most of :meth:`allocated_bytes` since :meth:`reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let :meth:`peak_allocated_bytes` begin again."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the device."""

    def close(self) -> None:
        """Leave the device, and the process's settings, as they were found; the worker has let go of its tensors."""
        self.drop_graphs()
        self.empty_cache()


class _Done:
    """The event of work that is done."""

    def synchronize(self) -> None:
        """Return."""


class _Here:
    """Tensors that are on the host already."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)

    def wait(self) -> list[torch.Tensor]:
        """Return them."""
        return self._tensors


DONE = _Done()


class _Again:
    """A graph that runs its work again; what it returns goes to where the first run left it."""

    def __init__(self, work: Callable[[], Any], outputs: Any) -> None:
        self._work = work
        self._outputs = outputs

    def replay(self) -> None:
        """Run the work."""
        self._outputs.copy_(self._work())


class CpuRuntime(DeviceRuntime):
    """The host as its own device: work is done when a call returns, and nothing is copied."""

    shares_memory = True
    num_stages = 1
    can_capture = False

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))

    def staging(self, num_bytes: int) -> Staging:
        """Return host memory."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return Staging(memory, memory.numpy())

    def device_block(self, staging: Staging) -> torch.Tensor:
        """Return ``staging``."""
        return staging.tensor

    def copy(self, staging: Staging, block: torch.Tensor) -> Event:
        """Return at once: the two are one."""
        return DONE

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a tensor over the memory of ``array``."""
        return torch.from_numpy(array)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Return ``tensors`` themselves."""
        return _Here(tensors)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Return a graph that calls ``work``, which returns a tensor, again: a CPU saves nothing by recording it."""
        output = work()
        return _Again(work, output), output

    def drop_graphs(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Return: nothing is queued."""

    def memory_info(self) -> tuple[int, int]:
        """Return what this process can still take, and that with what its tensors hold, which is not known: 0."""
        free = available_memory_bytes()
        return free, free

    def allocated_bytes(self) -> int:
        """Return 0: the host's memory is not counted by tensor."""
        return 0

    def peak_allocated_bytes(self) -> int:
        """Return 0: see :meth:`allocated_bytes`."""
        return 0

    def reset_peak(self) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""


class _Copies:
    """Copies to pinned memory that a stream of their own makes."""

    def __init__(self, host: list[torch.Tensor], event: torch.cuda.Event) -> None:
        self._host = host
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        """Wait for the last copy, without the GIL, and return the host's tensors."""
        self._event.synchronize()
        return self._host


class CudaRuntime(DeviceRuntime):
    """A CUDA device. Work goes to the thread's current stream, copies to the host to a second one."""

    shares_memory = False
    num_stages = 2
    can_capture = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)
        # Float32 is asked for where exactness counts: no TF32 behind its back.
        self._tf32_before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._copies = torch.cuda.Stream(device)
        self._captures = torch.cuda.Stream(device)  # one: libraries keep workspaces for each stream that they see
        self._pool: Any = None

    def current(self) -> AbstractContextManager[object]:
        """Make it the thread's device, on which torch and Triton launch."""
        return torch.cuda.device(self.device)

    def staging(self, num_bytes: int) -> Staging:
        """Return pinned memory."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        return Staging(memory, memory.numpy())

    def device_block(self, staging: Staging) -> torch.Tensor:
        """Return zeroed device memory of the same size."""
        return torch.zeros(staging.tensor.shape, dtype=torch.uint8, device=self.device)

    def copy(self, staging: Staging, block: torch.Tensor) -> Event:
        """Queue the copy and return the event after it."""
        block.copy_(staging.tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return a copy of ``array`` by way of pinned memory, which torch keeps until the copy is made."""
        return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(self.device, non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Queue the copies on the second stream, after the work that is queued now."""
        self._copies.wait_stream(torch.cuda.current_stream())
        host: list[torch.Tensor] = []
        with torch.cuda.stream(self._copies):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.append(copy.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._copies)  # or its memory could be given away before it is read
            event = torch.cuda.Event()
            event.record()
        return _Copies(host, event)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Run ``work`` on a stream of its own, then record it there."""
        self._captures.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._captures):
            work()
        torch.cuda.current_stream().wait_stream(self._captures)
        self.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of an application that runs the engine in its own process may allocate meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._captures, capture_error_mode=mode):
            output = work()
        return graph, output

    def drop_graphs(self) -> None:
        """Forget the pool; its memory is free once the graphs are."""
        self._pool = None

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def memory_info(self) -> tuple[int, int]:
        """Return free and total memory of the device in bytes, whoever uses it."""
        return torch.cuda.mem_get_info(self.device)

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors of this process hold."""
        return torch.cuda.memory_allocated(self.device)

    def peak_allocated_bytes(self) -> int:
        """Return the most of :meth:`allocated_bytes` since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Let the peak begin at what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Give cached memory back to the device, and cached pinned memory to the host."""
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pyright: ignore[reportPrivateUsage]  (there is no public name for it)

    def close(self) -> None:
        """Give the memory back, and let the caller's own work have TF32 again where it had."""
        super().close()
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self._tf32_before


def make_runtime(device: torch.device) -> DeviceRuntime:
    """Return the runtime of ``device``, which this process owns from now on."""
    return CudaRuntime(device) if device.type == "cuda" else CpuRuntime(device)
