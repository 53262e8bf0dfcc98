"""What the backends on devices with memory of their own share: how their blocks lie, and that they read device batches.

A layer's cache is one tensor [2, N, S, KV, D], keys and values: pages as Triton's kernels and the flash-attn packages
both read them.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, GraphSupport, copy_along
from asyncllm.kernels.fused import fused_kernels

__all__ = ["PagedAttention"]


class PagedAttention(AttentionBackend):
    """A backend over such caches. Decode steps have the same launches whatever their lengths, others have not."""

    needs_device_batch: ClassVar[bool] = True
    graphs: ClassVar[GraphSupport] = GraphSupport.DECODE

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.fused = fused_kernels(spec.device)

    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""
        spec = self.spec
        return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.kv_format.dtype.itemsize

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Return one zeroed cache [2, N, S, KV, D] per layer."""
        spec = self.spec
        shape = (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return [torch.zeros(shape, dtype=spec.kv_format.dtype, device=spec.device) for _ in range(spec.num_layers)]

    def copy_blocks(self, caches: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks of keys and values."""
        copy_along(1, caches, sources, targets)
