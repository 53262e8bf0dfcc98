"""The operators as calls into the native library. Each call releases the GIL."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncllm.kernels import library
from asyncllm.kernels.base import (
    SAMPLING_DTYPE,
    Activation,
    Batch,
    DrawnTokens,
    Format,
    HeadOutput,
    Kernels,
    KvShape,
    Norm,
    PackedWeight,
    Rotary,
)
from asyncllm.kernels.library import CBatch, CKvCache, CLinear, CNorm, CRotary

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.kernels.decoder import Decoder, DecoderSpec

__all__ = ["NativeKernels", "NativePool"]

SPIN_US = 50  # loops of a step follow each other within microseconds; between steps a worker should sleep
ALIGNMENT = 64

NO_MEMORY = -1


class NativePool:
    """The library's threads; they start with the first call that needs them and end with this object."""

    def __init__(self, dll: ctypes.CDLL, num_threads: int, spin_us: int = SPIN_US) -> None:
        handle = dll.allm_pool_create(num_threads, spin_us)
        if not handle:
            raise ValueError(f"a pool of {num_threads} threads cannot be made")
        self.handle = ctypes.c_void_p(handle)
        self.num_threads = num_threads
        self.close = weakref.finalize(self, dll.allm_pool_destroy, self.handle)


class NativeKernels(Kernels):
    """The library for ``isa`` (default: the best that was compiled and runs here) on ``num_threads`` threads.

    :raises RuntimeError: there is no library to load; says why.
    """

    name = "native"

    def __init__(self, num_threads: int, isa: str | None = None, *, spin_us: int = SPIN_US) -> None:
        self.dll = library.load(isa)
        self.isa: str = self.dll.allm_isa().decode()
        self.pool = NativePool(self.dll, num_threads, spin_us)

    def use_fused_dot(self, wanted: bool) -> bool:
        """Let integer products use the instruction that multiplies and adds pairs, or not; return whether they do.

        By default they do where the machine has it (AVX-512 VNNI, AVX-VNNI). It holds for every user of this library in
        the process; results are the same bit for bit. For tests and benchmarks.
        """
        return bool(self.dll.allm_fused_dot(wanted))

    @property
    def description(self) -> str:
        """One line for the log and for ``info``."""
        return f"native {self.isa}, {self.pool.num_threads} threads"

    # ---- weights -----------------------------------------------------------------------------------------------------

    def empty_weight(
        self, n: int, k: int, stored_as: Format, bias: torch.Tensor | None = None, *, integer: bool = False
    ) -> PackedWeight:
        """Return a weight whose rows are still to be filled by :meth:`pack_rows`."""
        num_bytes = self.dll.allm_packed_bytes(c_format(stored_as, integer), n, k)
        if num_bytes < 0:
            arithmetic = " for integer products" if integer else ""
            raise ValueError(f"a weight of {n} x {k} cannot be stored as {stored_as.name}{arithmetic}")
        if bias is not None:
            bias = bias.detach().to(torch.float32).contiguous()
        return PackedWeight(n=n, k=k, format=stored_as, data=aligned_zeros(num_bytes), bias=bias, integer=integer)

    def pack_rows(self, weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
        """Fill the rows from ``first_row`` on."""
        rows = rows.detach()
        stored_as = weight.format
        blocks = stored_as.is_quantized and (rows.dtype == torch.uint8 or not stored_as.takes_plain)
        source = stored_as if blocks else Format.of(rows.dtype)
        width = stored_as.row_bytes(weight.k) if blocks else weight.k
        if rows.ndim != 2 or rows.shape[1] != width or (blocks and rows.dtype != torch.uint8):
            raise ValueError(f"rows are {tuple(rows.shape)} {rows.dtype}; {stored_as.name} wants [R, {width}]")
        count = rows.shape[0]
        rows = rows.contiguous()
        place = (c_format(stored_as, weight.integer), address(weight.data), weight.n, weight.k, first_row, count)
        status = self.dll.allm_pack_rows(self.pool.handle, *place, source, address(rows))
        check(status, f"rows {first_row} … {first_row + count} of {weight.n}")

    def gather_rows(self, weight: PackedWeight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return rows ``ids`` of ``weight`` times ``scale``."""
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], weight.k)
        args = (ctypes.byref(c_linear(weight)), address(ids), len(ids), scale, address(out), weight.k)
        check(self.dll.allm_gather_rows(self.pool.handle, *args), f"ids of rows; there are {weight.n} rows")
        return out

    # ---- matrix products ---------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x`` times ``weight`` plus its bias."""
        out = torch.empty(x.shape[0], weight.n) if out is None else out
        args = (ctypes.byref(c_linear(weight)), *matrix(x, weight.k), *matrix(out, weight.n), x.shape[0])
        check(self.dll.allm_linear_forward(self.pool.handle, *args), "linear")
        return out

    def gated_linear(
        self, x: torch.Tensor, gate: PackedWeight | None, up: PackedWeight, activation: Activation
    ) -> torch.Tensor:
        """Return ``activation(x @ gate.T) * (x @ up.T)``."""
        out = torch.empty(x.shape[0], up.n)
        c_gate = ctypes.byref(c_linear(gate)) if gate is not None else None
        args = (c_gate, ctypes.byref(c_linear(up)), activation, *matrix(x, up.k), *matrix(out), x.shape[0])
        check(self.dll.allm_gated_linear_forward(self.pool.handle, *args), "gated_linear")
        return out

    def head(self, x: torch.Tensor, weight: PackedWeight, *, with_logits: bool = True) -> HeadOutput:
        """Return the greatest logit of each row and its index, and all logits."""
        rows = x.shape[0]
        best, best_logits = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        logits = torch.empty(rows, weight.n) if with_logits else None
        c_logits = matrix(logits) if logits is not None else (None, 0)
        found = (address(best), address(best_logits))
        args = (ctypes.byref(c_linear(weight)), *matrix(x, weight.k), *c_logits, *found, rows)
        check(self.dll.allm_head_forward(self.pool.handle, *args), "head")
        return HeadOutput(best, best_logits, logits)

    def draw_tokens(
        self, logits: torch.Tensor, samplings: npt.NDArray[np.void], positions: npt.NDArray[np.int64]
    ) -> DrawnTokens:
        """Return a token of each row of ``logits``."""
        rows, vocab_size = logits.shape
        if samplings.dtype != SAMPLING_DTYPE or samplings.shape != (rows,) or positions.shape != (rows,):
            raise ValueError(f"{rows} rows want as many samplings and positions: {samplings.shape}, {positions.shape}")
        token_ids, best = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        samplings, positions = np.ascontiguousarray(samplings), np.ascontiguousarray(positions, np.int64)
        args = (
            *matrix(logits),
            vocab_size,
            address(samplings),
            address(positions),
            address(token_ids),
            address(best),
            rows,
        )
        check(self.dll.allm_draw_tokens(self.pool.handle, *args), "draw_tokens")
        return DrawnTokens(token_ids, best)

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def add_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Add ``residual`` to ``x`` in place and return the norm of the sum."""
        m, n = x.shape
        out = torch.empty(m, n)
        c_residual = matrix(residual, n) if residual is not None else (None, 0)
        args = (ctypes.byref(c_norm(norm)), *matrix(x), *c_residual, *matrix(out), m, n)
        check(self.dll.allm_add_norm(self.pool.handle, *args), "add_norm")
        return out

    def activate(self, gate: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``activation(gate) * up``."""
        m, n = gate.shape
        out = torch.empty(m, n)
        c_up = matrix(up, n) if up is not None else (None, 0)
        check(
            self.dll.allm_activate(self.pool.handle, activation, *matrix(gate), *c_up, *matrix(out), m, n), "activate"
        )
        return out

    # ---- attention ---------------------------------------------------------------------------------------------------

    def why_not_kv(self, shape: KvShape) -> str | None:
        """Return why a cache of this shape is not possible, ``None`` if it is."""
        if shape.format.is_quantized:
            return f"keys and values cannot be stored as {shape.format.name}"
        return None

    def kv_block_bytes(self, shape: KvShape) -> int:
        """Return the bytes of one block of one layer."""
        num_bytes = self.dll.allm_kv_block_bytes(ctypes.byref(c_kv_cache(shape)))
        if num_bytes < 0:
            raise ValueError(self.why_not_kv(shape) or f"no cache of {shape}")
        return num_bytes

    def allocate_kv(self, shape: KvShape, num_blocks: int) -> torch.Tensor:
        """Return one layer's cache of ``num_blocks`` blocks."""
        return aligned_zeros(self.kv_block_bytes(shape) * num_blocks)

    def rotate_and_write(
        self,
        shape: KvShape,
        cache: torch.Tensor,
        batch: Batch,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
    ) -> None:
        """Norm and rotate ``query`` and ``key`` in place, store ``key`` and ``value`` in their slots."""
        num_tokens = key.shape[0]
        c_query, heads = (tokens_of(query), query.shape[1]) if query is not None else ((None, 0), 0)
        parts = (optional(c_rotary, rotary), optional(c_norm, query_norm), optional(c_norm, key_norm))
        args = (*parts, *c_query, heads, *tokens_of(key), *tokens_of(value))
        places = (address(batch.positions), address(batch.slot_mapping), num_tokens)
        c_cache = ctypes.byref(c_kv_cache(shape, cache))
        check(self.dll.allm_rotate_and_write(self.pool.handle, c_cache, *args, *places), "rotate_and_write")

    def read_kv(self, shape: KvShape, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value of ``slots``."""
        key, value = (torch.empty(len(slots), shape.num_kv_heads, shape.head_dim) for _ in range(2))
        slots = slots.contiguous()
        args = (
            ctypes.byref(c_kv_cache(shape, cache)),
            address(slots),
            len(slots),
            address(key),
            address(value),
        )
        check(self.dll.allm_read_kv(*args), "read_kv")
        return key, value

    def attention(
        self,
        shape: KvShape,
        cache: torch.Tensor,
        batch: Batch,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return causal attention of ``query`` over the rows' blocks."""
        num_tokens, heads, head_dim = query.shape
        out = torch.empty(num_tokens, heads * head_dim)
        c_cache, c_batch = ctypes.byref(c_kv_cache(shape, cache)), ctypes.byref(make_c_batch(batch, num_tokens))
        args = (*tokens_of(query), heads, scale, window or 0, *matrix(out))
        check(self.dll.allm_paged_attention(self.pool.handle, c_cache, c_batch, *args), "attention")
        return out

    # ---- a whole decoder ---------------------------------------------------------------------------------------------

    def make_decoder(self, spec: DecoderSpec) -> Decoder:
        """Return the decoder that ``spec`` describes, ready to step."""
        from asyncllm.kernels.native_decoder import NativeDecoder  # it needs this module

        return NativeDecoder(self, spec)


# ---- Python objects as C structs and pointers ------------------------------------------------------------------------


def address(array: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Return where the first element lies."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return array.__array_interface__["data"][0]


def check(status: int, what: str) -> None:
    """Return if a call succeeded.

    :raises MemoryError: it could not get scratch memory.
    :raises ValueError: it refused its arguments.
    """
    if status == NO_MEMORY:
        raise MemoryError(f"no memory for the native kernels ({what})")
    if status:
        raise ValueError(f"the native kernels refuse these arguments: {what}")


def aligned_zeros(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory at the start of a cache line; the system gives its pages as they are first written."""
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    offset = -address(memory) % ALIGNMENT
    return torch.from_numpy(memory[offset : offset + num_bytes])  # pyright: ignore[reportUnknownMemberType]


def matrix(x: torch.Tensor, columns: int | None = None) -> tuple[int, int]:
    """Return pointer and row stride of a float32 matrix.

    :raises ValueError: it is not one, or has not ``columns`` columns.
    """
    if x.dtype != torch.float32 or x.ndim != 2 or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"activations are float32 rows, not {tuple(x.shape)} {x.dtype} of strides {x.stride()}")
    if columns is not None and x.shape[1] != columns:
        raise ValueError(f"rows have {x.shape[1]} elements, not {columns}")
    return x.data_ptr(), x.stride(0)


def tokens_of(x: torch.Tensor) -> tuple[int, int]:
    """Return pointer and token stride of float32 heads [T, H, D], the heads of a token side by side."""
    if x.dtype != torch.float32 or x.stride(2) != 1 or (x.stride(1) != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"heads are float32 [T, H, D], contiguous per token, not {x.dtype} of strides {x.stride()}")
    return x.data_ptr(), x.stride(0)


def c_format(stored_as: Format, integer: bool) -> int:
    """Return what the C interface calls a weight stored so."""
    return stored_as + library.INTEGER if integer else stored_as


def c_linear(weight: PackedWeight | None) -> CLinear:
    """Return ``weight`` as the C interface takes it."""
    if weight is None:
        return CLinear()
    bias = weight.bias.data_ptr() if weight.bias is not None else None
    return CLinear(weight.data.data_ptr(), bias, weight.n, weight.k, c_format(weight.format, weight.integer), 0)


def c_norm(norm: Norm) -> CNorm:
    """Return ``norm`` as the C interface takes it."""
    for part in (norm.weight, norm.bias):
        if part is not None and (part.dtype != torch.float32 or not part.is_contiguous()):
            raise ValueError(f"norm weights are contiguous float32, not {part.dtype}")
    pointers = [part.data_ptr() if part is not None else None for part in (norm.weight, norm.bias)]
    return CNorm(*pointers, norm.eps, norm.kind)


def c_rotary(rotary: Rotary) -> CRotary:
    """Return ``rotary`` as the C interface takes it."""
    for table in (rotary.cos, rotary.sin):
        if table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError("rotary tables are contiguous float32")
    return CRotary(rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.dim, rotary.interleaved)


def c_kv_cache(shape: KvShape, cache: torch.Tensor | None = None) -> CKvCache:
    """Return a layer's cache as the C interface takes it."""
    blocks = cache.data_ptr() if cache is not None else None
    return CKvCache(blocks, shape.format, shape.block_size, shape.num_kv_heads, shape.head_dim)


def make_c_batch(batch: Batch, num_tokens: int) -> CBatch:
    """Return ``batch`` as the C interface takes it."""
    for array, dtype in zip(batch, (np.int64, np.int64, np.int64, np.int32, np.int32, np.int32), strict=True):
        if array.dtype != dtype or array.strides[-1] != array.itemsize:
            raise ValueError(f"the batch has {array.dtype} where {np.dtype(dtype)} is expected")
    tokens = (address(batch.token_ids), address(batch.positions), address(batch.slot_mapping))
    rows = (address(batch.query_start), address(batch.seq_lens), address(batch.block_table))
    stride = batch.block_table.strides[0] // batch.block_table.itemsize
    return CBatch(num_tokens, len(batch.seq_lens), *tokens, *rows, stride)


def optional(make: Any, value: Any) -> Any:
    """Return a reference to ``make(value)``, ``None`` for ``None``."""
    return None if value is None else ctypes.byref(make(value))
