"""The operators in plain torch: the oracle of the tests, and what runs where no library was compiled.

Equal to the native library within rounding; plain rather than fast.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm.kernels.base import (
    Activation,
    Batch,
    Format,
    HeadOutput,
    Kernels,
    KvShape,
    Norm,
    NormKind,
    PackedWeight,
    Rotary,
)
from asyncllm.kernels.ggml_blocks import TYPE_TO_FUNCTION

if TYPE_CHECKING:
    from asyncllm.kernels.decoder import Decoder, DecoderSpec

__all__ = ["TorchKernels", "dequantize_blocks"]


class TorchKernels(Kernels):
    """Everything through torch, on torch's own threads. ``data`` of a weight is the weight [n, k], dequantized."""

    name = "torch"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    @property
    def description(self) -> str:
        """One line for the log and for ``info``: that this is the slow one, and why."""
        return "torch fallback, several times slower than the native kernels" + (
            f": {self.reason}" if self.reason else ""
        )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def empty_weight(
        self, n: int, k: int, stored_as: Format, bias: torch.Tensor | None = None, *, integer: bool = False
    ) -> PackedWeight:
        """Return a weight whose rows are still to be filled by :meth:`pack_rows`."""
        if integer:
            raise ValueError("the torch operators have no integer products")
        if stored_as.is_quantized and k % stored_as.block_values:
            raise ValueError(f"a weight of {n} x {k} cannot be stored as {stored_as.name}")
        dtype = torch.float32 if stored_as.is_quantized else stored_as.dtype
        bias = bias.detach().float() if bias is not None else None
        return PackedWeight(n=n, k=k, format=stored_as, data=torch.zeros(n, k, dtype=dtype), bias=bias)

    def pack_rows(self, weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
        """Fill the rows from ``first_row`` on; of a quantized format they must be blocks."""
        if weight.format.is_quantized:
            rows = dequantize_blocks(rows, weight.format)
        if rows.ndim != 2 or rows.shape[1] != weight.k or not 0 <= first_row <= weight.n - rows.shape[0]:
            raise ValueError(f"rows {tuple(rows.shape)} from {first_row} on do not fit into {weight.n} x {weight.k}")
        weight.data[first_row : first_row + rows.shape[0]] = rows

    def gather_rows(self, weight: PackedWeight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return rows ``ids`` of ``weight`` times ``scale``."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.n:
            raise ValueError(f"ids of rows; there are {weight.n} rows")
        return weight.data.index_select(0, ids).float() * scale

    # ---- matrix products ---------------------------------------------------------------------------------------------

    def linear(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x`` times ``weight`` plus its bias."""
        y = F.linear(x, weight.data[: weight.n].float(), weight.bias)
        return y if out is None else out.copy_(y)

    def gated_linear(
        self, x: torch.Tensor, gate: PackedWeight | None, up: PackedWeight, activation: Activation
    ) -> torch.Tensor:
        """Return ``activation(x @ gate.T) * (x @ up.T)``."""
        if gate is None:
            return self.activate(self.linear(x, up), activation)
        return self.activate(self.linear(x, gate), activation, self.linear(x, up))

    def head(self, x: torch.Tensor, weight: PackedWeight, *, with_logits: bool = True) -> HeadOutput:
        """Return the greatest logit of each row and its index, and all logits."""
        logits = self.linear(x, weight)
        best = logits.argmax(-1)
        return HeadOutput(best, logits.gather(1, best[:, None])[:, 0], logits if with_logits else None)

    # ---- elementwise -------------------------------------------------------------------------------------------------

    def add_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Add ``residual`` to ``x`` in place and return the norm of the sum."""
        if residual is not None:
            x.add_(residual)
        return apply_norm(x, norm)

    def activate(self, gate: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``activation(gate) * up``."""
        match activation:
            case Activation.NONE:
                result = gate.clone()
            case Activation.RELU:
                result = F.relu(gate)
            case Activation.SILU:
                result = F.silu(gate)
            case Activation.GELU_TANH:
                result = F.gelu(gate, approximate="tanh")
            case Activation.GELU:
                result = F.gelu(gate)
        return result if up is None else result.mul_(up)

    # ---- attention: a cache is [2, slots, KV, D], keys and values ----------------------------------------------------

    def why_not_kv(self, shape: KvShape) -> str | None:
        """Return why a cache of this shape is not possible, ``None`` if it is."""
        return None if shape.format.is_plain else f"torch stores no keys and values as {shape.format.name}"

    def kv_block_bytes(self, shape: KvShape) -> int:
        """Return the bytes of one block of one layer."""
        return 2 * shape.block_size * shape.num_kv_heads * shape.head_dim * shape.format.dtype.itemsize

    def allocate_kv(self, shape: KvShape, num_blocks: int) -> torch.Tensor:
        """Return one layer's cache of ``num_blocks`` blocks."""
        slots = num_blocks * shape.block_size
        return torch.zeros(2, slots, shape.num_kv_heads, shape.head_dim, dtype=shape.format.dtype)

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
        positions, slots = torch.from_numpy(batch.positions), torch.from_numpy(batch.slot_mapping)
        for heads, norm in ((query, query_norm), (key, key_norm)):
            if heads is None:
                continue
            normed = heads if norm is None else apply_norm(heads, norm)
            heads.copy_(normed if rotary is None else rotate(normed, positions, rotary))
        kept = slots >= 0
        cache[0, slots[kept]] = key[kept].to(cache.dtype)
        cache[1, slots[kept]] = value[kept].to(cache.dtype)

    def read_kv(self, shape: KvShape, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value of ``slots``."""
        return cache[0, slots].float(), cache[1, slots].float()

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
        """Return causal attention of ``query`` over the rows' blocks, one row of the batch after the other."""
        out = torch.empty_like(query)
        group, block_size = query.shape[1] // shape.num_kv_heads, shape.block_size
        for row, length in enumerate(batch.seq_lens.tolist()):
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            tokens = torch.arange(length)
            blocks = torch.from_numpy(batch.block_table[row]).long()[tokens // block_size]
            key, value = self.read_kv(shape, cache, blocks * block_size + tokens % block_size)
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)  # [L, H, D]
            position = torch.arange(length - (last - first), length)[:, None]
            hidden = tokens > position
            if window is not None:
                hidden |= tokens <= position - window
            scores = torch.einsum("qhd,khd->hqk", query[first:last] * scale, key)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, value)
        return out.flatten(1)

    # ---- a whole decoder ---------------------------------------------------------------------------------------------

    def make_decoder(self, spec: DecoderSpec) -> Decoder:
        """Return the decoder that ``spec`` describes, ready to step."""
        from asyncllm.kernels.composed_decoder import ComposedDecoder  # it needs this package's interface

        return ComposedDecoder(self, spec)


def apply_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return ``x`` normalised over its last dimension."""
    size = x.shape[-1:]
    match norm.kind:
        case NormKind.NONE:
            return x.clone()
        case NormKind.RMS:
            y = F.rms_norm(x, size, norm.weight, norm.eps)
            return y if norm.bias is None else y + norm.bias
        case NormKind.LAYER:
            return F.layer_norm(x, size, norm.weight, norm.bias, norm.eps)


def rotate(heads: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Return heads [T, H, D] with their first ``rotary.dim`` elements rotated."""
    cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]  # [T, 1, dim / 2]
    turned = heads[..., : rotary.dim]
    a, b = (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.chunk(2, -1)
    parts = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(parts, -1).flatten(-2) if rotary.interleaved else torch.cat(parts, -1)
    return torch.cat((turned, heads[..., rotary.dim :]), -1)


def dequantize_blocks(rows: torch.Tensor, stored_as: Format) -> torch.Tensor:
    """Return GGUF blocks (uint8 [n, bytes]) as float32 [n, k], rounded as gguf's own dequantization rounds."""
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] % stored_as.block_bytes:
        raise ValueError(f"rows of {stored_as.name} are uint8 of whole blocks, not {tuple(rows.shape)} {rows.dtype}")
    blocks = rows.contiguous().view(-1, stored_as.block_bytes)
    return TYPE_TO_FUNCTION[stored_as.name](blocks).reshape(rows.shape[0], -1)
