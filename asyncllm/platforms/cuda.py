"""The CUDA platform: one NVIDIA GPU, chosen by what torch says of this machine.

Torch is asked when a platform is, never at import, and only its counts and properties: that starts the driver, but puts
nothing on a device. Whoever calls it is the engine's process or a worker's, which import torch anyway.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from asyncllm.errors import ConfigError
from asyncllm.platforms.base import Platform
from asyncllm.platforms.cpu import available_memory_bytes

if TYPE_CHECKING:
    from asyncllm.config import DeviceConfig

__all__ = ["GPU", "MIN_CAPABILITY", "CudaPlatform", "CudaProbe", "index_of", "probe"]

MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16, which the kernels compute in."""
DEVICE_PATTERN = re.compile(r"cuda(?::(\d{1,4}))?")


@dataclass(frozen=True)
class GPU:
    """One device as torch names it."""

    name: str
    capability: tuple[int, int]

    @property
    def why_not(self) -> str | None:
        """Why it cannot serve, ``None`` if it can."""
        if self.capability >= MIN_CAPABILITY:
            return None
        found, wanted = (".".join(map(str, version)) for version in (self.capability, MIN_CAPABILITY))
        return f"{self.name} has the compute capability {found}; {wanted} (Ampere) or newer is needed"


@dataclass(frozen=True, kw_only=True)
class CudaProbe:
    """What torch says of this machine's GPUs."""

    cuda_version: str | None
    """The CUDA version that torch was built with, ``None`` for a build without."""
    gpus: tuple[GPU, ...] = ()
    complaint: str = ""
    """What torch warned of while it looked."""

    @property
    def why_none(self) -> str | None:
        """Why there is no GPU at all, ``None`` if there is one."""
        if self.cuda_version is None:
            return "torch was built without CUDA"
        if not self.gpus:
            return "torch finds no GPU" + (f" ({self.complaint})" if self.complaint else "")
        return None

    def first_usable(self) -> tuple[int | None, str]:
        """Return the index of the first GPU that can serve, or ``None``, and the reason for that answer."""
        if self.why_none is not None:
            return None, self.why_none
        for index, gpu in enumerate(self.gpus):
            if gpu.why_not is None:
                return index, gpu.name
        return None, "; ".join(gpu.why_not or "" for gpu in self.gpus)

    def check(self, index: int, device: str) -> None:
        """Return if the GPU ``index``, which the option ``device`` asks for, can serve.

        :raises ConfigError: it cannot; says why and what to do.
        """
        if self.cuda_version is None:
            problem, limit = "torch was built without CUDA; install a CUDA build of torch, or use 'cpu'", "'cpu'"
        elif not self.gpus:
            problem = f"{self.why_none}: install the NVIDIA driver, or let this process see the GPU "
            problem, limit = problem + "(CUDA_VISIBLE_DEVICES, --gpus of a container); or use 'cpu'", "'cpu'"
        elif index >= len(self.gpus):
            limit = f"at most 'cuda:{len(self.gpus) - 1}'"
            problem = f"this process sees {len(self.gpus)} GPUs; it must be {limit}"
        elif (reason := self.gpus[index].why_not) is not None:
            problem, limit = f"{reason}; use another GPU, or 'cpu'", "compute capability 8.0"
        else:
            return
        raise ConfigError(f"device is {device!r}, but {problem}", parameter="device", value=device, limit=limit)


def probe() -> CudaProbe:
    """Ask torch, and import it if nobody did."""
    import torch

    if torch.version.cuda is None:
        return CudaProbe(cuda_version=None)
    with warnings.catch_warnings(record=True) as caught:  # an old driver is told as a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = [GPU(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]
    complaint = "; ".join(" ".join(str(warning.message).split()) for warning in caught)
    return CudaProbe(cuda_version=torch.version.cuda, gpus=tuple(gpus), complaint=complaint)


def index_of(device: str) -> int | None:
    """Return the index in ``cuda:1`` (0 for ``cuda``), ``None`` where ``device`` is not of that form."""
    match = DEVICE_PATTERN.fullmatch(device)
    return int(match[1] or 0) if match else None


class CudaPlatform(Platform):
    """One NVIDIA GPU."""

    name: ClassVar[str] = "cuda"
    worker_cls: ClassVar[str] = "asyncllm.worker.worker.Worker"
    attention_backends: ClassVar[tuple[str, ...]] = ("triton", "flash_attn")
    has_own_memory: ClassVar[bool] = True

    def __init__(self, index: int, reason: str = "") -> None:
        super().__init__(reason)
        self.index = index

    @property
    def device(self) -> str:
        """``cuda:0``, for one."""
        return f"cuda:{self.index}"

    def default_dtype(self, stored_as: str | None) -> str:
        """Return the checkpoint's dtype if it is of 16 bits, else bfloat16; float32 has to be asked for."""
        return stored_as if stored_as in ("bfloat16", "float16") else "bfloat16"

    def free_memory_bytes(self) -> int:
        """Return the host memory that this process can still take: for weights of an engine that sleeps."""
        return available_memory_bytes()

    def kv_cache_cap_bytes(self) -> int | None:
        """Return ``None``: ``gpu_memory_utilization`` says all there is to say."""
        return None

    def num_threads(self, config: DeviceConfig) -> int:
        """Return the option, else 1: the host only plans and loads."""
        return config.num_threads or 1
