"""Backends against float64 attention over the unpaged rows, written independently of them."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionBackend
from asyncllm.attention.cpu import CpuAttention
from asyncllm.attention.native import NativeAttention
from asyncllm.attention.reference import ReferenceAttention
from asyncllm.kernels.base import Batch, KvShape
from tests.support.attention import PagedRows, exact, make_spec
from tests.support.kernels import native_kernels

BACKENDS = [ReferenceAttention, CpuAttention]


def check(
    rows: PagedRows, steps: list[list[tuple[int, int, int]]], cls: type[AttentionBackend], window: int | None
) -> None:
    backend = cls(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    tolerance = 3e-6 if rows.spec.dtype == torch.float32 else 4e-2
    for parts in steps:
        for (row, begin, end), got in zip(parts, rows.run(backend, cache, parts, window=window), strict=True):
            want = exact(rows, row, window=window)[begin:end]
            assert got.shape == want.shape
            assert (got.double() - want).abs().max() < tolerance


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("cls", BACKENDS)
def test_prefill_chunk_and_decode_share_a_step(
    cls: type[AttentionBackend], heads: int, kv_heads: int, block_size: int, window: int | None
) -> None:
    rows = PagedRows(make_spec(heads=heads, kv_heads=kv_heads, block_size=block_size), [9, 21, 30, 1, 17])
    first = [(0, 0, 8), (1, 0, 13), (2, 0, 29), (4, 0, 16)]
    mixed = [(2, 29, 30), (3, 0, 1), (1, 13, 21), (0, 8, 9), (4, 16, 17)]
    check(rows, [first, mixed], cls, window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cls", [CpuAttention])
def test_long_prefill_in_odd_chunks(cls: type[AttentionBackend], window: int | None) -> None:
    rows = PagedRows(make_spec(heads=6, kv_heads=3, head_dim=16, block_size=16), [700, 40, 300])
    steps = [
        [(0, 0, 301), (1, 0, 39)],
        [(1, 39, 40), (0, 301, 699), (2, 0, 65)],
        [(2, 65, 300), (0, 699, 700)],
    ]
    check(rows, steps, cls, window)


@pytest.mark.parametrize("cls", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_cache(cls: type[AttentionBackend], dtype: torch.dtype) -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2, dtype=dtype), [11, 6])
    check(rows, [[(0, 0, 10), (1, 0, 5)], [(0, 10, 11), (1, 5, 6)]], cls, None)


@pytest.mark.parametrize("cls", BACKENDS)
@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16])
def test_a_cache_of_half_the_bytes_holds_rounded_numbers_for_float32_arithmetic(
    cls: type[AttentionBackend], stored_as: torch.dtype
) -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2, kv_cache_dtype=str(stored_as).removeprefix("torch.")), [90, 6])
    plain = PagedRows(make_spec(heads=4, kv_heads=2), [90, 6])
    backend = cls(rows.spec)
    assert backend.bytes_per_block() == cls(plain.spec).bytes_per_block() // 2
    [cache] = backend.allocate(rows.num_blocks)
    for part in (*rows.keys, *rows.values):
        part.copy_(part.to(stored_as))  # what is stored is then exact, and the tolerance that of float32
    for parts in ([(0, 0, 80), (1, 0, 5)], [(0, 80, 90), (1, 5, 6)]):
        for (row, begin, end), got in zip(parts, rows.run(backend, cache, parts), strict=True):
            assert got.dtype == torch.float32
            assert (got.double() - exact(rows, row)[begin:end]).abs().max() < 3e-6


def test_cpu_takes_strided_queries_keys_and_values() -> None:
    spec = make_spec(heads=4, kv_heads=2)
    rows = PagedRows(spec, [7])
    fused = torch.cat([rows.queries[0], rows.keys[0], rows.values[0]], 1)
    rows.queries, rows.keys, rows.values = [fused[:, :4]], [fused[:, 4:6]], [fused[:, 6:]]
    check(rows, [[(0, 0, 7)]], CpuAttention, None)


def test_cpu_decode_is_the_same_bit_for_bit_alone_and_in_any_batch() -> None:
    lens = [1, 5, 16, 17, 33, 64, 100, 130, 7, 64]
    rows = PagedRows(make_spec(heads=6, kv_heads=3, head_dim=64, block_size=4), lens)
    backend = CpuAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    prompts = [(row, 0, n - 1) for row, n in enumerate(lens) if n > 1]
    rows.run(backend, cache, prompts)
    decode = [(row, n - 1, n) for row, n in enumerate(lens)]
    together = rows.run(backend, cache, decode)
    backwards = rows.run(backend, cache, decode[::-1])[::-1]
    for row, part in enumerate(decode):
        [alone] = rows.run(backend, cache, [part])
        assert torch.equal(alone, together[row])
        assert torch.equal(alone, backwards[row])


def test_reference_is_the_same_bit_for_bit_in_any_chunking() -> None:
    rows = PagedRows(make_spec(heads=2, kv_heads=1), [23])
    backend = ReferenceAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    [whole] = rows.run(backend, cache, [(0, 0, 23)])
    chunks = [rows.run(backend, cache, [(0, begin, min(begin + 5, 23))])[0] for begin in range(0, 23, 5)]
    assert torch.equal(torch.cat(chunks), whole)


def test_cpu_groups_are_split_when_a_gather_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PagedRows(make_spec(heads=2, kv_heads=1), [20, 19, 18, 20, 20])
    monkeypatch.setattr("asyncllm.attention.cpu.GATHER_BYTES", 2 * 5 * CpuAttention(rows.spec).bytes_per_block())
    prompts = [(row, 0, n - 1) for row, n in enumerate(rows.seq_lens)]
    check(rows, [prompts, [(row, n - 1, n) for row, n in enumerate(rows.seq_lens)]], CpuAttention, None)


def test_scrubbed_blocks_cannot_harm_their_next_owner() -> None:
    rows = PagedRows(make_spec(block_size=4), [3])
    backend = CpuAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    cache.fill_(torch.nan)  # a request whose numbers were not finite owned these blocks
    backend.scrub([cache], [0, *rows.blocks[0]])
    [got] = rows.run(backend, cache, [(0, 0, 3)])
    assert (got.double() - exact(rows, 0)).abs().max() < 3e-6


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_native_scrub_zeroes_blocks_that_are_not_finite_and_no_other(kv_cache_dtype: str) -> None:
    kernels = native_kernels()
    spec = make_spec(kv_heads=1, block_size=4)
    backend = NativeAttention(replace(spec, kernels=kernels, head_dim=8, kv_cache_dtype=kv_cache_dtype))
    shape = KvShape(num_kv_heads=1, head_dim=8, block_size=4, format=backend.spec.kv_format)
    [cache] = backend.allocate(3)
    slots = np.arange(12)
    nothing = np.zeros(1, np.int32)
    batch = Batch(slots, slots * 0, slots, nothing, nothing, nothing[:, None])
    key, value = torch.randn(2, 12, 1, 8)
    value[5, 0, 3] = torch.nan
    kernels.rotate_and_write(shape, cache, batch, None, key, value)
    before = [part.clone() for part in kernels.read_kv(shape, cache, torch.arange(12))]
    backend.scrub([cache], [0, 1, 2])
    for old, new in zip(before, kernels.read_kv(shape, cache, torch.arange(12)), strict=True):
        assert torch.equal(new[4:8], torch.zeros(4, 1, 8))
        assert torch.equal(new[:4], old[:4])
        assert torch.equal(new[8:], old[8:])


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_native_blocks_are_copied_with_their_scales(kv_cache_dtype: str) -> None:
    kernels = native_kernels()
    spec = make_spec(kv_heads=1, block_size=4)
    backend = NativeAttention(replace(spec, kernels=kernels, head_dim=8, kv_cache_dtype=kv_cache_dtype))
    shape = KvShape(num_kv_heads=1, head_dim=8, block_size=4, format=backend.spec.kv_format)
    [cache] = backend.allocate(4)
    slots = np.arange(12)
    nothing = np.zeros(1, np.int32)
    batch = Batch(slots, slots * 0, slots, nothing, nothing, nothing[:, None])
    key, value = torch.randn(2, 12, 1, 8)
    kernels.rotate_and_write(shape, cache, batch, None, key, value)
    before = [part.clone() for part in kernels.read_kv(shape, cache, torch.arange(12))]
    backend.copy_blocks([cache], torch.tensor([1, 2]), torch.tensor([2, 3]))
    for old, new in zip(before, kernels.read_kv(shape, cache, torch.arange(16)), strict=True):
        assert torch.equal(new, torch.cat([old[:8], old[4:12]]))


def test_scrub_leaves_finite_numbers_alone() -> None:
    backend = CpuAttention(make_spec())
    [cache] = backend.allocate(3)
    cache.normal_()
    before = cache.clone()
    backend.scrub([cache], [0, 1, 2])
    assert torch.equal(cache, before)


@pytest.mark.parametrize("cls", BACKENDS)
def test_bytes_per_block_is_what_allocate_takes(cls: type[AttentionBackend]) -> None:
    backend = cls(make_spec(heads=6, kv_heads=3))
    taken = 0
    for cache in backend.allocate(10):
        taken += sum(part.nbytes for part in (cache if isinstance(cache, tuple) else (cache,)))
    assert taken == 10 * backend.bytes_per_block()


def test_cpu_cache_takes_no_memory_until_it_is_used() -> None:
    spec = make_spec(heads=8, kv_heads=8, head_dim=64, block_size=16)
    backend = CpuAttention(spec)
    num_blocks = (256 << 20) // backend.bytes_per_block()
    before = resident_bytes()
    [cache] = backend.allocate(num_blocks)
    assert cache.nbytes == 256 << 20
    assert cache.data_ptr() % 64 == 0
    assert resident_bytes() - before < 16 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
