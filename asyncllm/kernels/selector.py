"""Choose the kernels: the native library where it is compiled and runs here, else torch, and say which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.kernels import library

if TYPE_CHECKING:
    from asyncllm.kernels.base import Kernels

__all__ = ["describe_kernels", "make_kernels"]


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
