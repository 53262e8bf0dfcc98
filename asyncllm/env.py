"""The only reader of ``os.environ``.

Every variable is read when it is asked for, never at import, so that a test or a host application can set it late.
An option given in code always wins over its variable.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["hf_cache_dir", "log_level", "runtime_dir", "startup_timeout_s"]


def startup_timeout_s(default: float) -> float:
    """Return ``ASYNCLLM_STARTUP_TIMEOUT_S``: seconds an engine may take to become ready."""
    return float(os.environ.get("ASYNCLLM_STARTUP_TIMEOUT_S") or default)


def log_level() -> str:
    """Return ``ASYNCLLM_LOG_LEVEL``: what the engine process writes to its log file (default ``INFO``)."""
    return os.environ.get("ASYNCLLM_LOG_LEVEL") or "INFO"


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
