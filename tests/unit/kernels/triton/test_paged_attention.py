"""The attention kernels in Triton's interpreter, against float64 attention written independently of them.

Blocks that hold no token are full of NaN, which no result may show. Cuts are made smaller than in use: the interpreter
takes milliseconds for each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncllm.attention.base import StepLimits
from tests.support.attention import PagedRows, exact, make_spec

pytestmark = pytest.mark.triton

Step = list[tuple[int, int, int]]  # row, first token, end

SMALL_CHUNK, LARGE_CHUNK = 16, 32


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.attention.triton.SMALL_CHUNK", SMALL_CHUNK)
    monkeypatch.setattr("asyncllm.attention.triton.LARGE_CHUNK", LARGE_CHUNK)


def run(
    rows: PagedRows,
    steps: list[Step],
    *,
    window: int | None = None,
    padding: int = 0,
    softcap: float = 0.0,
    change: Callable[[Any], None] | None = None,
) -> list[list[torch.Tensor]]:
    """Return the results of each part of each step, from a cache that held nothing but NaN."""
    from asyncllm.attention.triton import TritonAttention

    assert TritonAttention.why_not(rows.spec) is None
    backend = TritonAttention(rows.spec)
    backend.softcap = softcap
    if change is not None:
        change(backend)
    [cache] = backend.allocate(rows.num_blocks)
    cache.fill_(torch.nan)
    return [rows.run(backend, cache, parts, window=window, padding=padding) for parts in steps]


def check(
    rows: PagedRows,
    steps: list[Step],
    *,
    window: int | None = None,
    softcap: float = 0.0,
    tolerance: float = 2e-6,
) -> None:
    for parts, results in zip(steps, run(rows, steps, window=window, softcap=softcap), strict=True):
        for (row, begin, end), got in zip(parts, results, strict=True):
            want = exact(rows, row, window=window, softcap=softcap)[begin:end]
            assert got.shape == want.shape
            assert (got.double() - want).abs().max() < tolerance


def prefill_then(*lens: int) -> list[Step]:
    """Return a prefill of all but the last token of each row, then a decode of those."""
    return [
        [(row, 0, length - 1) for row, length in enumerate(lens) if length > 1],
        [(row, length - 1, length) for row, length in enumerate(lens)],
    ]


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 256])
def test_block_sizes(block_size: int) -> None:
    check(PagedRows(make_spec(heads=4, kv_heads=2, block_size=block_size), [37, 1, 20]), prefill_then(37, 1, 20))


@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 80, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check(PagedRows(make_spec(heads=2, kv_heads=1, head_dim=head_dim), [21]), prefill_then(21), tolerance=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (10, 2), (8, 1), (17, 1), (40, 1)])
def test_groups_of_query_heads(heads: int, kv_heads: int) -> None:
    check(PagedRows(make_spec(heads=heads, kv_heads=kv_heads), [24, 9]), prefill_then(24, 9))


def test_prefill_chunk_and_decode_share_a_step() -> None:
    rows = PagedRows(make_spec(heads=6, kv_heads=3), [9, 71, 30, 1, 47])
    first = [(0, 0, 8), (1, 0, 13), (2, 0, 29), (4, 0, 16)]
    check(rows, [first, [(2, 29, 30), (3, 0, 1), (1, 13, 71), (0, 8, 9), (4, 16, 47)]])


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_sliding_windows(window: int) -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [90, 50])
    check(rows, [[(0, 0, 60), (1, 0, 49)], [(0, 60, 89)], [(0, 89, 90), (1, 49, 50)]], window=window)


@pytest.mark.parametrize("window", [None, 12])
def test_softcap(window: int | None) -> None:
    check(PagedRows(make_spec(heads=4, kv_heads=2), [40]), prefill_then(40), window=window, softcap=2.0)


@pytest.mark.parametrize(
    ("dtype", "stored", "tolerance"),
    [
        (torch.bfloat16, "auto", 3e-2),
        (torch.float16, "auto", 4e-3),
        (torch.float32, "bfloat16", 3e-2),
        (torch.float32, "float16", 4e-3),
        (torch.bfloat16, "float32", 3e-2),
        (torch.bfloat16, "float16", 3e-2),
    ],
)
def test_number_formats(dtype: torch.dtype, stored: str, tolerance: float) -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2, dtype=dtype, kv_cache_dtype=stored), [40])
    check(rows, prefill_then(40), tolerance=tolerance)


def test_a_short_run_over_a_long_prefix_is_merged_from_parts() -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [200, 140])
    check(rows, [[(0, 0, 160), (1, 0, 120)], [(0, 160, 200), (1, 120, 140)]])


def test_rows_that_take_turns_in_scratch_memory() -> None:
    limits = StepLimits(max_num_seqs=3, max_num_batched_tokens=256, max_model_len=256)
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [100, 100, 100], limits=limits)

    def few_parts(backend: Any) -> None:
        backend.max_parts = 4

    cached = [(row, 0, 80) for row in range(3)]
    run_last = [(row, 80, 100) for row in range(3)]
    [_, results] = run(rows, [cached, run_last], change=few_parts)
    for row, got in enumerate(results):
        assert (got.double() - exact(rows, row)[80:]).abs().max() < 2e-6
