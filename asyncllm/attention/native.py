"""Attention on the native CPU kernels: one call per layer over the whole flat batch, prefill and decode alike.

A token's result is reduced in an order that depends on its own position only, so it is the same bit for bit alone, in a
batch, and however the prompt was cut into chunks. A model that runs as one native call per step uses the caches and the
plan of this backend and never calls :meth:`NativeAttention.forward` (:mod:`asyncllm.models.native`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, FlatBatch
from asyncllm.kernels.base import Batch, KvShape

if TYPE_CHECKING:
    from asyncllm.kernels.base import Kernels

__all__ = ["NativeAttention"]

NO_TOKENS = np.zeros(0, np.int64)


class NativeAttention(AttentionBackend):
    """Paged attention of the compiled library; keys of 16 tokens side by side, whatever their format."""

    name: ClassVar[str] = "native"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        assert spec.kernels is not None, "why_not() was not asked"
        self._kernels: Kernels = spec.kernels
        self._shape = _shape(spec)

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why the library cannot serve ``spec``, ``None`` if it can."""
        if spec.kernels is None:
            return "the native kernels are not in use"
        if spec.dtype != torch.float32:
            return f"it computes in float32, not {spec.dtype}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads"
        return spec.kernels.why_not_kv(_shape(spec))

    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""
        return self.spec.num_layers * self._kernels.kv_block_bytes(self._shape)

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Return one cache per layer; the system gives their pages as they are first written."""
        return [self._kernels.allocate_kv(self._shape, num_blocks) for _ in range(self.spec.num_layers)]

    def scrub(self, caches: list[torch.Tensor], block_ids: list[int]) -> None:
        """Zero those of the blocks that hold a number that is not finite; the others may be other requests' as well."""
        size = self._shape.block_size
        for cache in caches:
            blocks = cache.view(-1, self._kernels.kv_block_bytes(self._shape))
            for block_id in block_ids:
                slots = torch.arange(block_id * size, (block_id + 1) * size)
                if not all(part.isfinite().all() for part in self._kernels.read_kv(self._shape, cache, slots)):
                    blocks[block_id] = 0

    def copy_blocks(self, caches: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks, with the scales of those that have some."""
        for cache in caches:
            blocks = cache.view(-1, self._kernels.kv_block_bytes(self._shape))
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    def plan(self, batch: FlatBatch) -> Batch:
        """Return the arrays of the step as the library takes them; the token ids are the model's to fill in."""
        return Batch(
            token_ids=NO_TOKENS,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
        )

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: Batch) -> None:
        """Store ``key`` and ``value`` [T, KV, D] at the step's slots."""
        self._kernels.rotate_and_write(self._shape, cache, plan, None, key.contiguous(), value.contiguous())

    def forward(
        self, query: torch.Tensor, cache: torch.Tensor, plan: Batch, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of ``query`` [T, H, D] over the rows' blocks, as [T, H * D]."""
        return self._kernels.attention(self._shape, cache, plan, query.contiguous(), scale=scale, window=window)


def _shape(spec: AttentionSpec) -> KvShape:
    return KvShape(
        num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=spec.block_size, format=spec.kv_format
    )
