"""The operations of :class:`asyncllm.kernels.fused.FusedKernels` in Triton, one launch each.

Arithmetic is in float32; numbers are rounded to the model's dtype where the torch twin rounds them, so that elementwise
results are equal to the twin's bit for bit, and those with a sum or an exponential in them within its rounding. A row
is reduced by one program in an order that its size alone decides: no result depends on its neighbours.

Rows of inputs may be strided; their last dimension must be contiguous. There is at least one row.
"""

# Kernels are read by Triton's compiler, not called by Python.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from asyncllm.kernels.base import DrawnTokens
from asyncllm.kernels.fused import FusedKernels, HeadNorms, Rotation
from asyncllm.kernels.triton.operators import define_operator
from asyncllm.kernels.triton.sample import draw_tokens

__all__ = ["INTERPRETED", "TritonFusedKernels"]

INTERPRETED = triton.knobs.runtime.interpret
"""Whether these kernels run in Triton's interpreter, on CPU tensors."""
_INTERPRETED = tl.constexpr(INTERPRETED)  # pyright: ignore[reportCallIssue]

EXACT = {"enable_fp_fusion": False}  # a fused multiply-add would not round the product, as torch does
GATE_BLOCK = 1024
HEADS_ELEMENTS = 2048  # numbers of the heads that one program rotates: several heads, so that long prompts fill it


class TritonFusedKernels(FusedKernels):
    """The operations in Triton: on CUDA tensors, and in Triton's interpreter on CPU ones."""

    name = "triton"
    draws = True

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [T, size] normalised, as a new tensor."""
        return _rms_norm(x, weight, eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``update`` to ``hidden`` (both [T, size]) in place, and return the sum normalised, as a new tensor."""
        return _add_rms_norm(hidden, update, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` [T, size]; activations that no kernel has are left to torch."""
        kind = NAME_TO_KIND.get(activation)
        return super().gate(gate_up, activation) if kind is None else _gate(gate_up, kind)

    def rotate_and_write(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        cache: torch.Tensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Return the query heads [T, H, D] normalised and rotated, as a new tensor; store keys and values."""
        query_weight, key_weight, eps = (None, None, 0.0) if norms is None else norms
        return _rotate_and_write(heads, rotation.cos, rotation.sin, cache, slots, query_weight, key_weight, eps)

    def draw_tokens(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        number: torch.Tensor,
    ) -> DrawnTokens:
        """Return a token of each row of ``logits`` [R, V]; see :mod:`asyncllm.kernels.triton.sample`."""
        _check_rows(logits)
        return DrawnTokens(*draw_tokens(logits, temperature, top_k, top_p, min_p, number))


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Return float32 ``x`` rounded to the nearest number of ``dtype``, of that dtype."""
    if _INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts bits off instead
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


# ---- norms -----------------------------------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(
    out_ptr,
    hidden_ptr,
    update_ptr,
    weight_ptr,
    eps,
    hidden_stride,
    update_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Normalise row ``program_id(0)``, with ``ADD`` after adding to it; ``WIDE``: round after the weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    hidden = hidden_ptr + row * hidden_stride + columns
    x = tl.load(hidden, mask=inside, other=0.0)
    if ADD:
        update = tl.load(update_ptr + row * update_stride + columns, mask=inside, other=0.0)
        x = round_to(x.to(tl.float32) + update.to(tl.float32), x.dtype)
        tl.store(hidden, x, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if not WIDE:
        wide = round_to(wide, x.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, round_to(wide * weight, x.dtype), mask=inside)


def _launch_norm(x: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, size = x.shape
    _check_rows(x, weight, *(() if update is None else (update,)))
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        out,
        x,
        x if update is None else update,
        weight,
        eps,
        x.stride(0),
        0 if update is None else update.stride(0),
        SIZE=size,
        BLOCK=block,
        ADD=update is not None,
        WIDE=weight.dtype == torch.float32,
        num_warps=min(max(block // 512, 1), 16),
        **EXACT,
    )
    return out


def _run_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch_norm(x, None, weight, eps)


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_add_rms_norm(hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


# ---- activations -----------------------------------------------------------------------------------------------------

SILU, GELU_TANH = 0, 1
NAME_TO_KIND = {"silu": SILU, "swish": SILU, "gelu_new": GELU_TANH, "gelu_pytorch_tanh": GELU_TANH}


@triton.jit
def gate_kernel(out_ptr, gate_up_ptr, gate_up_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Gate ``BLOCK`` numbers of row ``program_id(0)`` by SiLU, or with ``TANH`` by the tanh form of GELU."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate_up = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_up, mask=inside, other=0.0)
    up = tl.load(gate_up + SIZE, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    # (1 + tanh y) / 2 is the logistic function of 2 y
    y = 1.5957691216057308 * (x + 0.044715 * x * x * x) if TANH else x
    activated = round_to(x / (1.0 + tl.exp(tl.minimum(-y, 88.0))), gate.dtype).to(tl.float32)  # no infinity
    tl.store(out_ptr + row * SIZE + columns, round_to(activated * up, gate.dtype), mask=inside)


def _run_gate(gate_up: torch.Tensor, kind: int) -> torch.Tensor:
    _check_rows(gate_up)
    out = _fake_gate(gate_up, kind)
    num_rows, size = out.shape
    block = min(triton.next_power_of_2(size), GATE_BLOCK)
    grid = (num_rows, triton.cdiv(size, block))
    gate_kernel[grid](out, gate_up, gate_up.stride(0), SIZE=size, BLOCK=block, TANH=kind == GELU_TANH, **EXACT)
    return out


def _fake_gate(gate_up: torch.Tensor, kind: int) -> torch.Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


# ---- heads -----------------------------------------------------------------------------------------------------------


@triton.jit
def rotate_and_write_kernel(
    query_ptr,
    heads_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    heads_stride,
    cos_stride,
    sin_stride,
    cache_stride_kind,
    cache_stride_block,
    cache_stride_offset,
    cache_stride_head,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Place ``BLOCK_H`` of the query, key and value heads of token ``program_id(0)``; ``BLOCK_D`` covers half a head.

    ``NORM``: with norms of query and key heads; ``WIDE``: rounded after the weight.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    place = tl.arange(0, BLOCK_D)
    column = place[None, :]
    inside = (head < H + 2 * KV)[:, None] & (column < D // 2)
    is_query = (head < H)[:, None]
    is_rotated = (head < H + KV)[:, None]
    source = heads_ptr + token * heads_stride + head[:, None] * D + column
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + D // 2, mask=inside, other=0.0)
    dtype = low.dtype

    x, y = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        x, y = x * scale, y * scale
        if not WIDE:
            x, y = round_to(x, dtype).to(tl.float32), round_to(y, dtype).to(tl.float32)
        weight_ptr = tl.where(is_query, query_weight_ptr + column, key_weight_ptr + column)
        x *= tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
        y *= tl.load(weight_ptr + D // 2, mask=inside, other=0.0).to(tl.float32)
        x, y = round_to(x, dtype).to(tl.float32), round_to(y, dtype).to(tl.float32)

    half = place < D // 2
    cos = tl.load(cos_ptr + token * cos_stride + place, mask=half, other=0.0).to(tl.float32)[None, :]
    minus_sin = tl.load(sin_ptr + token * sin_stride + place, mask=half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * sin_stride + D // 2 + place, mask=half, other=0.0).to(tl.float32)[None, :]
    rotated_low = round_to(x * cos, dtype).to(tl.float32) + round_to(y * minus_sin, dtype).to(tl.float32)
    rotated_high = round_to(y * cos, dtype).to(tl.float32) + round_to(x * sin, dtype).to(tl.float32)
    low = tl.where(is_rotated, round_to(rotated_low, dtype), low)
    high = tl.where(is_rotated, round_to(rotated_high, dtype), high)

    query = query_ptr + (token * H + head)[:, None] * D + column
    tl.store(query, low, mask=inside & is_query)
    tl.store(query + D // 2, high, mask=inside & is_query)

    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        is_key = head < H + KV
        place_of_head = tl.where(is_key, head - H, head - H - KV) * cache_stride_head
        place_of_kind = tl.where(is_key, 0, 1).to(tl.int64) * cache_stride_kind
        first = slot // BLOCK_SIZE * cache_stride_block + slot % BLOCK_SIZE * cache_stride_offset
        stored = cache_ptr + (first + place_of_kind + place_of_head)[:, None] + column
        cache_dtype = cache_ptr.dtype.element_ty
        written = inside & (head >= H)[:, None]
        tl.store(stored, round_to(low.to(tl.float32), cache_dtype), mask=written)
        tl.store(stored + D // 2, round_to(high.to(tl.float32), cache_dtype), mask=written)


def _run_rotate_and_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    query = _fake_rotate_and_write(heads, cos, sin, cache, slots, query_weight, key_weight, eps)
    num_tokens, num_heads, head_dim = query.shape
    _check_rows(slots, cos, sin)
    if heads.stride(2) != 1 or heads.stride(1) != head_dim or cache.stride(4) != 1 or sin.stride(2) != head_dim // 2:
        raise ValueError(f"heads of a token are contiguous, not of strides {heads.stride()}, {cache.stride()}")
    norm = query_weight is not None and key_weight is not None
    half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(triton.next_power_of_2(heads.shape[1]), max(1, HEADS_ELEMENTS // (2 * half)))
    rotate_and_write_kernel[(num_tokens, triton.cdiv(heads.shape[1], block_heads))](
        query,
        heads,
        cos,
        sin,
        cache,
        slots,
        query_weight if norm else heads,
        key_weight if norm else heads,
        eps,
        heads.stride(0),
        cos.stride(0),
        sin.stride(0),
        *cache.stride()[:4],
        H=num_heads,
        KV=cache.shape[3],
        D=head_dim,
        BLOCK_SIZE=cache.shape[2],
        BLOCK_H=block_heads,
        BLOCK_D=half,
        NORM=norm,
        WIDE=query_weight is not None and query_weight.dtype == torch.float32,
        **EXACT,
    )
    return query


def _fake_rotate_and_write(heads: torch.Tensor, cos: Any, sin: Any, cache: torch.Tensor, *rest: Any) -> torch.Tensor:
    return heads.new_empty((heads.shape[0], heads.shape[1] - 2 * cache.shape[3], heads.shape[2]))


# ---- operators -------------------------------------------------------------------------------------------------------


def _check_rows(*tensors: torch.Tensor) -> None:
    """Raise if a last dimension is not contiguous."""
    for x in tensors:
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"rows are contiguous, not {tuple(x.shape)} of strides {x.stride()}")


_rms_norm = define_operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _run_rms_norm,
    _fake_rms_norm,
)
_add_rms_norm = define_operator(
    "add_rms_norm(Tensor(a!) hidden, Tensor update, Tensor weight, float eps) -> Tensor",
    _launch_norm,
    _fake_add_rms_norm,
)
_gate = define_operator("gate(Tensor gate_up, int kind) -> Tensor", _run_gate, _fake_gate)
_rotate_and_write = define_operator(
    "rotate_and_write(Tensor heads, Tensor cos, Tensor sin, Tensor(a!) cache, Tensor slots, Tensor? query_weight,"
    " Tensor? key_weight, float eps) -> Tensor",
    _run_rotate_and_write,
    _fake_rotate_and_write,
)
