"""Batches for attention backends: random paged rows, and a cache filled through the seam itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, FlatBatch


def make_spec(
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
) -> AttentionSpec:
    return AttentionSpec(
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_cache_dtype=kv_cache_dtype,
    )


def make_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: Sequence[Sequence[int]], block_size: int
) -> FlatBatch:
    """Return the flat batch of rows whose last ``query_lens`` of ``seq_lens`` tokens are new."""
    queries, lens = np.array(query_lens, np.int32), np.array(seq_lens, np.int32)
    table = np.zeros((len(lens), max(len(row) for row in block_table)), np.int32)
    for row, ids in enumerate(block_table):
        table[row, : len(ids)] = ids
    positions = np.concatenate([np.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)]).astype(
        np.int64
    )
    rows = np.repeat(np.arange(len(lens)), queries)
    slots = table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return FlatBatch(
        query_lens=queries,
        seq_lens=lens,
        query_start=start,
        block_table=table,
        slot_mapping=slots,
        positions=positions,
    )


class PagedRows:
    """Rows with random keys and values, their blocks scattered at random; runs any part of them on a backend."""

    def __init__(self, spec: AttentionSpec, seq_lens: Sequence[int], *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.seq_lens = list(seq_lens)

        def random(heads: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, spec.head_dim, generator=generator).to(spec.dtype) for n in self.seq_lens]

        self.queries, self.keys, self.values = (
            random(spec.num_heads),
            random(spec.num_kv_heads),
            random(spec.num_kv_heads),
        )
        counts = [-(-n // spec.block_size) for n in self.seq_lens]
        self.num_blocks = sum(counts) + 1
        ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.blocks: list[list[int]] = []
        for count in counts:
            self.blocks.append(ids[:count])
            del ids[:count]

    def run(
        self,
        backend: AttentionBackend,
        cache: Any,
        parts: Sequence[tuple[int, int, int]],
        *,
        scale: float = 0.3,
        window: int | None = None,
    ) -> list[torch.Tensor]:
        """Run tokens ``begin … end`` of ``row`` for each of ``parts`` in one step; return each part's result."""
        batch = make_batch(
            [end - begin for _, begin, end in parts],
            [end for _, _, end in parts],
            [self.blocks[row] for row, _, _ in parts],
            self.spec.block_size,
        )

        def gather(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([rows[row][begin:end] for row, begin, end in parts])

        plan = backend.plan(batch)
        backend.write_kv(gather(self.keys), gather(self.values), cache, plan)
        out = backend.forward(gather(self.queries), cache, plan, scale=scale, window=window)
        return list(out.split([end - begin for _, begin, end in parts]))
