"""Which machine this is: its worker class, memory, cores, number formats and attention backends.

No torch at import: the engine process asks for the worker's *name* and the worker's module brings torch in. Only where
there may be a GPU is torch asked, by whoever calls :func:`current`: the engine's process or a worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import ConfigError
from asyncllm.platforms import cuda
from asyncllm.platforms.base import Platform
from asyncllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig

__all__ = ["Platform", "current"]


def current(config: EngineConfig) -> Platform:
    """Return the platform that ``config.device.device`` names; ``auto``: a GPU that can serve, else the CPU.

    A backend that only the CPU has (``attention_backend="native"``) decides ``auto`` as well. Not for the front end:
    torch may be imported.

    :raises ConfigError: the device is not known, not there or too old; says what to do.
    """
    device = config.device.device
    if device == "cpu":
        return CpuPlatform("asked for")
    if device == "auto":
        backend = config.device.attention_backend
        if backend in CpuPlatform.attention_backends:
            return CpuPlatform(f"attention_backend is {backend!r}")
        index, reason = cuda.probe().first_usable()
        return CpuPlatform(reason) if index is None else cuda.CudaPlatform(index, reason)
    index = cuda.index_of(device)
    if index is None:
        raise ConfigError(
            f"device is {device!r}, which is not known; use 'auto', 'cpu', 'cuda' or 'cuda:1'",
            parameter="device",
            value=device,
            limit="'auto', 'cpu', 'cuda' or 'cuda:1'",
        )
    cuda.probe().check(index, device)
    return cuda.CudaPlatform(index, "asked for")
