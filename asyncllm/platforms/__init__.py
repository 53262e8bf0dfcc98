"""Which machine this is: its worker class, memory, cores, number formats and attention backends.

No torch here: the engine process asks for the worker's *name* and the worker's module brings torch in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import ConfigError
from asyncllm.platforms.base import Platform
from asyncllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig

__all__ = ["Platform", "current"]


def current(config: EngineConfig) -> Platform:
    """Return the platform that ``config.device.device`` names; ``auto`` takes the best one that this version supports.

    :raises ConfigError: the device is not known, or this version cannot run on it.
    """
    device = config.device.device
    if device in ("auto", "cpu"):
        return CpuPlatform()
    raise ConfigError(
        f"device is {device!r}, which this version does not support; use 'cpu' or 'auto'",
        parameter="device",
        value=device,
        limit="'auto' or 'cpu'",
    )
