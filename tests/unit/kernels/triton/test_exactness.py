"""What a row's numbers do not depend on: its neighbours, padding, the size of the grid, and how a prompt was cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.attention import PagedRows, make_spec

pytestmark = pytest.mark.triton

LENS = [70, 5, 40, 33]
DECODE = [(row, length - 1, length) for row, length in enumerate(LENS)]
MIXED = [(0, 58, 69), (1, 4, 5), (2, 38, 40), (3, 0, 33)]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.attention.triton.SMALL_CHUNK", 16)
    monkeypatch.setattr("asyncllm.attention.triton.LARGE_CHUNK", 32)


def make_rows(dtype: torch.dtype = torch.float32) -> PagedRows:
    return PagedRows(make_spec(heads=6, kv_heads=2, head_dim=16, dtype=dtype), LENS)


def filled(rows: PagedRows) -> tuple[Any, Any]:
    """Return a backend and a cache that holds all tokens of all rows."""
    from asyncllm.attention.triton import TritonAttention

    backend = TritonAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    cache.fill_(torch.nan)
    keys, values = cache
    size = rows.spec.block_size
    for row, blocks in enumerate(rows.blocks):
        for position, (key, value) in enumerate(zip(rows.keys[row], rows.values[row], strict=True)):
            keys[blocks[position // size], position % size] = key
            values[blocks[position // size], position % size] = value
    return backend, cache


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [DECODE, MIXED], ids=["decode", "mixed"])
def test_neighbours(parts: list[tuple[int, int, int]], dtype: torch.dtype, window: int | None) -> None:
    rows = make_rows(dtype)
    backend, cache = filled(rows)
    together = rows.run(backend, cache, parts, window=window)
    for part, got in zip(parts, together, strict=True):
        [alone] = rows.run(backend, cache, [part], window=window)
        assert torch.equal(alone, got)


@pytest.mark.parametrize("parts", [DECODE, MIXED], ids=["decode", "mixed"])
def test_padding(parts: list[tuple[int, int, int]]) -> None:
    rows = make_rows()
    backend, cache = filled(rows)
    without = torch.cat(rows.run(backend, cache, parts))
    assert torch.equal(torch.cat(rows.run(backend, cache, parts, padding=4)), without)


@pytest.mark.parametrize("parts", [DECODE, MIXED], ids=["decode", "mixed"])
def test_the_size_of_the_grid(parts: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows()
    backend, cache = filled(rows)
    results = list[torch.Tensor]()
    for programs in (1, 7, 50):
        monkeypatch.setattr(
            "asyncllm.kernels.triton.paged_attention.num_programs", lambda _, programs=programs: programs
        )
        results.append(torch.cat(rows.run(backend, cache, parts)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_scratch_memory_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking turns changes when a part is computed and where it waits, not what it is."""
    rows = make_rows()
    backend, cache = filled(rows)
    parts = [(0, 58, 69), (2, 29, 40), (3, 20, 32)]
    one_wave = torch.cat(rows.run(backend, cache, parts))
    monkeypatch.setattr("asyncllm.attention.work_list.WorkList.slots_of_a_wave", lambda _: 1)
    assert torch.equal(torch.cat(rows.run(backend, cache, parts)), one_wave)


def test_whole_prefill_is_the_same_as_in_chunks() -> None:
    """In chunks of whole tiles: the interpreter's matrix product rounds a row by its place among the others."""
    rows = make_rows()
    backend, cache = filled(rows)
    backend.max_parts = 1  # uncut: where a row is cut depends on the length of the chunk
    [whole] = rows.run(backend, cache, [(0, 0, 70)])
    chunks = [rows.run(backend, cache, [(0, begin, end)])[0] for begin, end in [(0, 30), (30, 40), (40, 70)]]
    assert torch.equal(torch.cat(chunks), whole)


def test_block_size_and_the_places_of_blocks() -> None:
    rows = make_rows()
    other = PagedRows(replace(rows.spec, block_size=7), LENS)
    assert torch.equal(
        torch.cat(rows.run(*filled(rows), MIXED)),
        torch.cat(other.run(*filled(other), MIXED)),
    )
