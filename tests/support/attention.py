"""Batches for attention backends: random paged rows, and a cache filled through the seam itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, DeviceBatch, FlatBatch, StepField, StepLimits


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


def put_on_device(batch: FlatBatch, fields: Sequence[StepField], *, rows: int = 0, tokens: int = 0) -> None:
    """Give ``batch`` what the runner gives a backend that needs a device batch, padded to ``rows`` and ``tokens``.

    The arrays are shared with the host's, as if the step's copy had been made; block tables lie in reverse order.
    """
    num_rows, num_tokens = len(batch.seq_lens), len(batch.positions)
    more_rows, more_tokens = max(rows - num_rows, 0), max(tokens - num_tokens, 0)
    batch.fields = {field.name: np.full(field.shape, 12345, field.dtype) for field in fields}

    def padded(values: Any, more: int, by: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values, np.full(more, by, values.dtype)]))

    batch.device = DeviceBatch(
        slots=padded(np.arange(num_rows, 0, -1).astype(np.int32), more_rows, 0),
        query_start=padded(batch.query_start, more_rows, num_tokens),
        seq_lens=padded(batch.seq_lens, more_rows, 0),
        slot_mapping=padded(batch.slot_mapping, more_tokens, -1),
        positions=padded(batch.positions, more_tokens, 0),
        block_tables=torch.from_numpy(np.concatenate([np.zeros_like(batch.block_table[:1]), batch.block_table[::-1]])),
        fields={name: torch.from_numpy(array) for name, array in batch.fields.items()},
    )


class PagedRows:
    """Rows with random keys and values, their blocks scattered at random; runs any part of them on a backend."""

    def __init__(
        self, spec: AttentionSpec, seq_lens: Sequence[int], *, seed: int = 0, limits: StepLimits | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.limits = limits or StepLimits(max_num_seqs=16, max_num_batched_tokens=1024, max_model_len=4096)
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

    def plan(self, backend: AttentionBackend, parts: Sequence[tuple[int, int, int]], *, padding: int = 0) -> Any:
        """Return the backend's plan of one step, of tokens ``begin … end`` of ``row`` for each of ``parts``."""
        batch = make_batch(
            [end - begin for _, begin, end in parts],
            [end for _, _, end in parts],
            [self.blocks[row] for row, _, _ in parts],
            self.spec.block_size,
        )
        if backend.needs_device_batch:
            fields = backend.step_fields(self.limits)
            put_on_device(batch, fields, rows=len(parts) + padding, tokens=len(batch.positions) + padding)
        return backend.plan(batch)

    def run(
        self,
        backend: AttentionBackend,
        cache: Any,
        parts: Sequence[tuple[int, int, int]],
        *,
        scale: float = 0.3,
        window: int | None = None,
        padding: int = 0,
    ) -> list[torch.Tensor]:
        """Run tokens ``begin … end`` of ``row`` for each of ``parts`` in one step; return each part's result.

        ``padding``: rows and tokens more that are computed, as under a captured graph.
        """

        def gather(rows: list[torch.Tensor]) -> torch.Tensor:
            part = torch.cat([rows[row][begin:end] for row, begin, end in parts])
            return torch.cat([part, part.new_full((padding, *part.shape[1:]), torch.nan)])

        plan = self.plan(backend, parts, padding=padding)
        backend.prepare(plan)
        backend.write_kv(gather(self.keys), gather(self.values), cache, plan)
        out = backend.forward(gather(self.queries), cache, plan, scale=scale, window=window)
        lens = [end - begin for _, begin, end in parts]
        return list(out[: sum(lens)].split(lens))


def exact(
    rows: PagedRows, row: int, *, scale: float = 0.3, window: int | None = None, softcap: float = 0.0
) -> torch.Tensor:
    """Return causal attention of all tokens of ``row`` in float64, [L, H * D]."""
    query, key, value = (part[row].double() for part in (rows.queries, rows.keys, rows.values))
    group = rows.spec.num_heads // rows.spec.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(len(query), device=query.device)
    hidden = place[None, :] > place[:, None]
    if window is not None:
        hidden |= place[None, :] <= place[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)
