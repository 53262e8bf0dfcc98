"""Find, load and describe the native library.

One file per instruction set lies in ``lib/`` beside this module; the plainest one is loaded first and asked what the
machine can run. Nothing happens at import, and nothing is compiled here.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncllm import env
from asyncllm.errors import ConfigError
from asyncllm.kernels import build

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CBatch",
    "CDecoder",
    "CKvCache",
    "CLayer",
    "CLinear",
    "CNorm",
    "CRotary",
    "CStepOutput",
    "available",
    "load",
    "open_library",
]

ABI_VERSION = 3
INTEGER = 64  # ALLM_INTEGER
OFF = "off"

c_pointer = ctypes.c_void_p
c_int64, c_int32, c_float = ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class CLinear(ctypes.Structure):
    """``allm_linear``."""

    _fields_ = (
        ("weight", c_pointer),
        ("bias", c_pointer),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int32),
        ("reserved", c_int32),
    )


class CNorm(ctypes.Structure):
    """``allm_norm``."""

    _fields_ = (("weight", c_pointer), ("bias", c_pointer), ("eps", c_float), ("kind", c_int32))


class CKvCache(ctypes.Structure):
    """``allm_kv_cache``."""

    _fields_ = (
        ("blocks", c_pointer),
        ("format", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    )


class CRotary(ctypes.Structure):
    """``allm_rotary``."""

    _fields_ = (("cos", c_pointer), ("sin", c_pointer), ("dim", c_int32), ("interleaved", c_int32))


class CBatch(ctypes.Structure):
    """``allm_batch``."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("token_ids", c_pointer),
        ("positions", c_pointer),
        ("slots", c_pointer),
        ("query_start", c_pointer),
        ("seq_lens", c_pointer),
        ("block_table", c_pointer),
        ("block_table_stride", c_int64),
    )


class CLayer(ctypes.Structure):
    """``allm_layer``."""

    _fields_ = (
        ("attention_norm", CNorm),
        ("q", CLinear),
        ("k", CLinear),
        ("v", CLinear),
        ("q_norm", CNorm),
        ("k_norm", CNorm),
        ("o", CLinear),
        ("attention_out_norm", CNorm),
        ("mlp_norm", CNorm),
        ("gate", CLinear),
        ("up", CLinear),
        ("down", CLinear),
        ("mlp_out_norm", CNorm),
        ("rotary", CRotary),
        ("attention_scale", c_float),
        ("window", c_int32),
    )


class CDecoder(ctypes.Structure):
    """``allm_decoder``."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("kv_format", c_int32),
        ("activation", c_int32),
        ("post_norm", c_int32),
        ("position_offset", c_int32),
        ("embedding_scale", c_float),
        ("reserved", c_int32),
        ("embedding", CLinear),
        ("position_embedding", c_pointer),
        ("project_in", CLinear),
        ("project_out", CLinear),
        ("final_norm", CNorm),
        ("head", CLinear),
        ("layers", c_pointer),
    )


class CStepOutput(ctypes.Structure):
    """``allm_step_output``."""

    _fields_ = (
        ("sample_rows", c_pointer),
        ("num_sample_rows", c_int64),
        ("hidden", c_pointer),
        ("logits", c_pointer),
        ("logits_stride", c_int64),
        ("best", c_pointer),
    )


P, I64, I32, F32 = c_pointer, c_int64, c_int32, c_float
MATRIX = (P, I64)  # pointer and stride

# name -> result type, argument types: the C header once more
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "allm_abi_version": (I32, ()),
    "allm_isa": (ctypes.c_char_p, ()),
    "allm_best_isa": (ctypes.c_char_p, ()),
    "allm_fused_dot": (I32, (I32,)),
    "allm_pool_create": (P, (I32, I32)),
    "allm_pool_destroy": (None, (P,)),
    "allm_pool_num_threads": (I32, (P,)),
    "allm_probe_multiply_add": (I64, (P, I64)),
    "allm_probe_read": (I64, (P, P, I64)),
    "allm_packed_bytes": (I64, (I32, I64, I64)),
    "allm_pack_rows": (I32, (P, I32, P, I64, I64, I64, I64, I32, P)),
    "allm_gather_rows": (I32, (P, P, P, I64, F32, *MATRIX)),
    "allm_linear_forward": (I32, (P, P, *MATRIX, *MATRIX, I64)),
    "allm_gated_linear_forward": (I32, (P, P, P, I32, *MATRIX, *MATRIX, I64)),
    "allm_head_forward": (I32, (P, P, *MATRIX, *MATRIX, P, P, I64)),
    "allm_add_norm": (I32, (P, P, *MATRIX, *MATRIX, *MATRIX, I64, I64)),
    "allm_activate": (I32, (P, I32, *MATRIX, *MATRIX, *MATRIX, I64, I64)),
    "allm_kv_block_bytes": (I64, (P,)),
    "allm_rotate_and_write": (I32, (P, P, P, P, P, *MATRIX, I32, *MATRIX, *MATRIX, P, P, I64)),
    "allm_read_kv": (I32, (P, P, I64, P, P)),
    "allm_paged_attention": (I32, (P, P, P, *MATRIX, I32, F32, I32, *MATRIX)),
    "allm_draw_tokens": (I32, (P, *MATRIX, I64, P, P, P, P, I64)),
    "allm_decoder_workspace_bytes": (I64, (P, I64, I64)),
    "allm_decoder_step": (I32, (P, P, P, P, P, P)),
}


@dataclass(frozen=True)
class Availability:
    """Whether the native library can be used here, and why not."""

    isa: str | None
    reason: str


def library_dir() -> Path:
    """Return the folder of the compiled libraries."""
    return build.LIBRARY_DIR


def usable() -> tuple[str, ...]:
    """Return the instruction sets that were compiled and that this machine runs, the plainest first."""
    built = [isa for isa in build.isas() if _path(isa).is_file()]
    if not built:
        return ()
    # The plainest build asks cpuid without executing anything newer.
    name: bytes = open_library(_path(built[0])).allm_best_isa()
    known, best = build.isas(), name.decode()
    runs = known[: known.index(best) + 1] if best in known else ()
    return tuple(isa for isa in built if isa in runs)


def available() -> Availability:
    """Return the instruction set that :func:`load` would choose, or why there is no library to load.

    ``ASYNCLLM_KERNELS`` chooses one by name, or ``off``.

    :raises ConfigError: it names an instruction set that this machine or this build does not have.
    """
    wanted = env.kernels()
    if wanted == OFF:
        return Availability(None, "switched off by ASYNCLLM_KERNELS=off")
    try:
        found = usable()
    except RuntimeError as error:  # compiled from other sources, or for another system
        return Availability(None, f"not usable: {error}")
    if wanted is not None and wanted not in found:
        raise ConfigError(
            f"ASYNCLLM_KERNELS is {wanted!r}; compiled and able to run here are: {', '.join(found) or 'none'}",
            parameter="ASYNCLLM_KERNELS",
            value=wanted,
        )
    if not found:
        how = "`python -m asyncllm.kernels.build` does it, with a C++ compiler"
        return Availability(None, f"not compiled for this machine ({platform.machine()}); {how}")
    return Availability(wanted or found[-1], "")


def load(isa: str | None = None) -> ctypes.CDLL:
    """Return the library for ``isa`` (default: what :func:`available` says), loaded once per process.

    :raises RuntimeError: there is none; says why.
    """
    if isa is None:
        found = available()
        if found.isa is None:
            raise RuntimeError(f"the native kernels are {found.reason}")
        isa = found.isa
    return open_library(_path(isa))


def _path(isa: str) -> Path:
    return build.library_path(isa, library_dir())


@cache
def open_library(path: Path) -> ctypes.CDLL:
    """Return the library at ``path`` with its functions typed.

    :raises RuntimeError: it cannot be loaded, or is from another version.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the native kernels cannot be loaded: {error}") from error
    if library.allm_abi_version() != ABI_VERSION:  # before anything that only this version has
        raise RuntimeError(f"{path} is from another version; `python -m asyncllm.kernels.build` makes a new one")
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
