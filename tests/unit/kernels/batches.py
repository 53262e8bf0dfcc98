"""Flat batches over scattered blocks, for the attention and decoder tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncllm.kernels.base import Batch


def make_batch(rows: Sequence[tuple[int, int]], block_size: int, *, seed: int = 0) -> tuple[Batch, int]:
    """Return a batch of rows (new tokens, all tokens), and the number of blocks (null block 0 included)."""
    counts = [-(-length // block_size) for _, length in rows]
    blocks = np.random.default_rng(seed).permutation(sum(counts)) + 1
    table = np.zeros((len(rows), max(counts) + 1), np.int32)
    for row, first in enumerate(np.cumsum([0, *counts[:-1]])):
        table[row, : counts[row]] = blocks[first : first + counts[row]]
    return batch_over(rows, table, block_size), len(blocks) + 1


def batch_over(rows: Sequence[tuple[int, int]], table: np.ndarray, block_size: int) -> Batch:
    """Return a batch of rows (new tokens, all tokens) whose blocks are in ``table``."""
    positions = [np.arange(length - new, length) for new, length in rows]
    slots = [table[row, p // block_size] * block_size + p % block_size for row, p in enumerate(positions)]
    return Batch(
        token_ids=np.zeros(sum(new for new, _ in rows), np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_start=np.cumsum([0, *(new for new, _ in rows)]).astype(np.int32),
        seq_lens=np.array([length for _, length in rows], np.int32),
        block_table=table,
    )


def last_tokens(batch: Batch, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return where tokens [first, last) of whole rows lie in ``batch``: parts of (row, first, last)."""
    return torch.cat([torch.arange(first, last) + int(batch.query_start[row]) for row, first, last in parts])
