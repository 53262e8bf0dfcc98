"""Choose the kernels: the native library where it is compiled and runs here, else torch, and say which."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asyncllm.errors import ConfigError
from asyncllm.kernels import library

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.kernels.base import Kernels

__all__ = ["choose_kernels", "describe_kernels", "make_kernels"]

logger = logging.getLogger(__name__)


def choose_kernels(config: EngineConfig, num_threads: int, *, dtype: str, device_type: str) -> Kernels | None:
    """Return the compiled kernels where they are there and wanted; ``None``: the model runs on torch.

    Says loudly where they are wanted and not there.

    :raises ConfigError: ``attention_backend="native"`` or ``quantization`` asks for them and they are not there, or
        ``ASYNCLLM_KERNELS`` names an instruction set that is not there.
    """
    wanted = config.device.attention_backend
    if device_type != "cpu" or dtype != "float32" or wanted not in ("auto", "native"):
        _refuse_quantization(config, f"with attention_backend={wanted!r} and {dtype} the model runs on torch")
        return None
    kernels = make_kernels(num_threads, may_spin=not config.device.share_cores)
    if kernels.name == "native":
        return kernels
    _refuse_quantization(config, f"there is only the {kernels.description}")
    logger.warning("%s; this is several times slower", kernels.description)
    if wanted == "native":
        raise ConfigError(
            f"attention_backend is 'native', but there is only the {kernels.description}",
            parameter="attention_backend",
            value=wanted,
        )
    return None


def _refuse_quantization(config: EngineConfig, reason: str) -> None:
    """Raise if weights are to be quantized: torch would need the memory of float32 for them, and be no faster."""
    quantization = config.model.quantization
    if quantization is not None:
        raise ConfigError(
            f"quantization is {quantization!r}, which needs the compiled CPU kernels in float32, but {reason}",
            parameter="quantization",
            value=quantization,
        )


def make_kernels(num_threads: int, *, may_spin: bool = True) -> Kernels:
    """Return the best kernels for this machine on ``num_threads`` threads; log ``.description`` of what came.

    ``may_spin``: idle threads may wait for the next loop awake for some microseconds.

    :raises ConfigError: ``ASYNCLLM_KERNELS`` names an instruction set that is not there.
    """
    found = library.available()
    if found.isa is None:
        from asyncllm.kernels.reference import TorchKernels

        return TorchKernels(found.reason)
    from asyncllm.kernels.native import SPIN_US, NativeKernels

    return NativeKernels(num_threads, found.isa, spin_us=SPIN_US if may_spin else 0)


def describe_kernels() -> str:
    """Return one line for ``info``: what :func:`make_kernels` would choose and why; loads no torch."""
    found = library.available()
    return f"native {found.isa}" if found.isa else f"torch fallback: the native kernels are {found.reason}"
