"""The only reader of ``os.environ``.

Every variable is read when it is asked for, never at import, so that a test or a host application can set it late.
An option given in code always wins over its variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "cxx",
    "engine_environment",
    "fused_kernels",
    "hf_cache_dir",
    "kernels",
    "log_level",
    "restore_pythonpath",
    "runtime_dir",
    "startup_timeout_s",
]

OUTER_PYTHONPATH = "ASYNCLLM_OUTER_PYTHONPATH"


def startup_timeout_s(default: float) -> float:
    """Return ``ASYNCLLM_STARTUP_TIMEOUT_S``: seconds an engine may take to become ready.

    :raises ValueError: it is no positive number.
    """
    value = os.environ.get("ASYNCLLM_STARTUP_TIMEOUT_S")
    if value and not float(value) > 0:
        raise ValueError("not positive")
    return float(value or default)


def log_level() -> str:
    """Return ``ASYNCLLM_LOG_LEVEL``: what the engine process writes to its log file (default ``INFO``)."""
    return os.environ.get("ASYNCLLM_LOG_LEVEL") or "INFO"


def cxx() -> str | None:
    """Return ``CXX``: the C++ compiler for the native CPU kernels (``None``: look for one)."""
    return os.environ.get("CXX") or None


def kernels() -> str | None:
    """Return ``ASYNCLLM_KERNELS``: the instruction set of the native CPU kernels, or ``off`` (``None``: the best)."""
    return os.environ.get("ASYNCLLM_KERNELS") or None


def fused_kernels() -> str | None:
    """Return ``ASYNCLLM_FUSED_KERNELS``: ``triton`` or ``torch`` (``None``: what suits the device)."""
    return os.environ.get("ASYNCLLM_FUSED_KERNELS") or None


def runtime_dir() -> Path | None:
    """Return ``ASYNCLLM_RUNTIME_DIR``: where private socket folders go (``None``: the system's choice)."""
    value = os.environ.get("ASYNCLLM_RUNTIME_DIR")
    return Path(value) if value else None


def hf_cache_dir() -> Path:
    """Return the Hugging Face hub cache: ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else the library's own default."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return base / "hub"


def engine_environment(python_path: Sequence[str]) -> dict[str, str]:
    """Return the environment of an engine process that imports from ``python_path``, in that order.

    The caller's own ``PYTHONPATH`` travels beside it, for :func:`restore_pythonpath`. ``OMP_WAIT_POLICY`` is
    ``passive`` unless the user has set it.
    """
    environment = dict(os.environ)
    environment[OUTER_PYTHONPATH] = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(python_path)
    # libgomp's threads would else spin at each barrier, and lose whole time slices where a core is shared: with the
    # caller's event loop always, with other programs often (measured: 5-200 times slower steps on a busy machine).
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    return environment


def restore_pythonpath() -> None:
    """Undo :func:`engine_environment` in the engine process, so that programs it starts see what the user set."""
    outer = os.environ.pop(OUTER_PYTHONPATH, None)
    if outer:
        os.environ["PYTHONPATH"] = outer
    elif outer is not None:
        os.environ.pop("PYTHONPATH", None)
