"""Choose the attention backend: a table of names; a backend's module is imported only when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import AttentionBackend, AttentionSpec

__all__ = ["choose_backend", "why_others_were_not"]

NAME_TO_BACKEND = {
    "cpu": ("asyncllm.attention.cpu", "CpuAttention"),
    "flash_attn": ("asyncllm.attention.flash_attn", "FlashAttention"),
    "native": ("asyncllm.attention.native", "NativeAttention"),
    "reference": ("asyncllm.attention.reference", "ReferenceAttention"),
    "triton": ("asyncllm.attention.triton", "TritonAttention"),
}


def choose_backend(
    name: str, spec: AttentionSpec, preferred: Sequence[str], *, any_block_size: bool = False
) -> AttentionBackend:
    """Return the backend called ``name``; ``auto``: the first of ``preferred`` that can serve ``spec``.

    ``any_block_size``: nobody asked for the block size in ``spec``; the backend may have another one in its own.

    :raises ConfigError: there is no such backend, or it cannot serve ``spec``; the text says why.
    """
    candidates = list(preferred) if name == "auto" else [name]
    reasons: list[str] = []
    for candidate in candidates:
        cls = _backend_class(candidate)
        wanted = replace(spec, block_size=cls.default_block_size(spec)) if any_block_size else spec
        reason = cls.why_not(wanted)
        if reason is None:
            return cls(wanted)
        reasons.append(f"{candidate}: {reason}")
    raise ConfigError(
        f"attention_backend {name!r} cannot serve this model: " + "; ".join(reasons),
        parameter="attention_backend",
        value=name,
    )


def why_others_were_not(chosen: str, name: str, spec: AttentionSpec, preferred: Sequence[str]) -> dict[str, str]:
    """Return why each of ``preferred`` but ``chosen`` was not taken where the option was ``name``; for explanations."""
    found: dict[str, str] = {}
    for candidate in preferred:
        if candidate == chosen:
            continue
        reason = _backend_class(candidate).why_not(spec)
        if reason is None:
            reason = f"{chosen} comes first" if name == "auto" else f"attention_backend={name!r} was asked for"
        found[candidate] = reason
    return found


def _backend_class(name: str) -> type[AttentionBackend]:
    if name not in NAME_TO_BACKEND:
        known = ", ".join(repr(known) for known in ("auto", *NAME_TO_BACKEND))
        raise ConfigError(
            f"attention_backend is {name!r}; it must be one of {known}",
            parameter="attention_backend",
            value=name,
            limit=known,
        )
    module, cls = NAME_TO_BACKEND[name]
    return getattr(importlib.import_module(module), cls)
