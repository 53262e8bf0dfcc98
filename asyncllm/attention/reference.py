"""The oracle: one row, one query token, one head at a time, by the formula. Slow and obviously right.

Every other backend is held against this one. A token's result depends on nothing but its own row, so it is the same bit
for bit alone, in a batch, and however the prompt was cut into chunks. Sources: Vaswani et al. 2017 (3.2.1);
Ainslie et al. 2023 (grouped heads).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, FlatBatch, copy_along, why_not_in_torch

__all__ = ["ReferenceAttention"]

Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values, each [N * S, KV, D]


class ReferenceAttention(AttentionBackend):
    """Attention by the formula, softmax in float32."""

    name: ClassVar[str] = "reference"

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve ``spec``: it needs whole groups of query heads and numbers of torch."""
        return why_not_in_torch(spec)

    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""
        spec = self.spec
        return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.kv_format.dtype.itemsize

    def allocate(self, num_blocks: int) -> list[Cache]:
        """Return one zeroed pair of keys and values per layer."""
        spec = self.spec
        shape, dtype = (num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim), spec.kv_format.dtype
        return [
            (
                torch.zeros(shape, dtype=dtype, device=spec.device),
                torch.zeros(shape, dtype=dtype, device=spec.device),
            )
            for _ in range(spec.num_layers)
        ]

    def copy_blocks(self, caches: list[Cache], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks of keys and values."""
        size = self.spec.block_size
        for cache in caches:
            copy_along(0, [rows.view(-1, size, *rows.shape[1:]) for rows in cache], sources, targets)

    def plan(self, batch: FlatBatch) -> FlatBatch:
        """Return the batch itself: nothing is prepared."""
        return batch

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: Cache, plan: FlatBatch) -> None:
        """Store each token's key and value at its slot."""
        keys, values = cache
        for token, slot in enumerate(plan.slot_mapping.tolist()):
            keys[slot] = key[token]
            values[slot] = value[token]

    def forward(
        self, query: torch.Tensor, cache: Cache, plan: FlatBatch, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of every query token over the tokens before it and itself, [T, H * D]."""
        spec = self.spec
        out = torch.empty(query.shape[0], spec.num_heads, spec.head_dim, dtype=query.dtype, device=query.device)
        for row in range(len(plan.query_lens)):
            first, last = int(plan.query_start[row]), int(plan.query_start[row + 1])
            keys, values = self._row(cache, plan, row)  # [L, KV, D]
            for token in range(first, last):
                end = int(plan.seq_lens[row]) - (last - 1 - token)  # tokens up to and including this one
                begin = 0 if window is None else max(0, end - window)
                for head in range(spec.num_heads):
                    kv_head = head // (spec.num_heads // spec.num_kv_heads)
                    scores = keys[begin:end, kv_head].float() @ query[token, head].float() * scale  # [L]
                    weights = torch.softmax(scores, 0)
                    out[token, head] = (weights @ values[begin:end, kv_head].float()).to(out.dtype)
        return out.flatten(1)

    def _row(self, cache: Cache, plan: FlatBatch, row: int) -> Cache:
        size = self.spec.block_size
        slots = [
            int(plan.block_table[row, position // size]) * size + position % size
            for position in range(int(plan.seq_lens[row]))
        ]
        keys, values = cache
        return keys[slots], values[slots]
