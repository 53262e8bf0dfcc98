"""What the backend says of itself and plans; its numbers are held in ``tests/unit/kernels/triton``."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncllm.attention.base import GraphSupport, StepLimits
from asyncllm.attention.triton import SCRATCH_BYTES, TritonAttention
from tests.support.attention import PagedRows, make_spec

LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131072)


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert TritonAttention.why_not(make_spec()) == "triton is not installed"


@pytest.mark.triton
def test_a_cpu_serves_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TritonAttention.why_not(make_spec()) is None
    monkeypatch.setattr("asyncllm.kernels.triton.paged_attention.INTERPRET", False)
    reason = TritonAttention.why_not(make_spec())
    assert reason == "it needs a CUDA device, not 'cpu' (or TRITON_INTERPRET=1, for tests)"


@pytest.mark.triton
def test_an_old_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.kernels.triton.paged_attention.device_capability", lambda: 75)
    spec = replace(make_spec(), device=torch.device("cuda"))
    assert TritonAttention.why_not(spec) == "the device's compute capability is 7.5; it needs 8.0"


def test_what_no_device_changes() -> None:
    assert "3 query heads are not a multiple of 2" in (TritonAttention.why_not(make_spec(heads=3, kv_heads=2)) or "")
    assert "kv_cache_dtype is 'int8'" in (TritonAttention.why_not(make_spec(kv_cache_dtype="int8")) or "")
    assert "head dim is 512" in (TritonAttention.why_not(make_spec(head_dim=512)) or "")


@pytest.mark.triton
def test_the_cache_takes_the_bytes_that_were_told() -> None:
    backend = TritonAttention(make_spec(heads=4, kv_heads=2, block_size=7, kv_cache_dtype="float16"))
    [cache] = backend.allocate(5)
    assert cache.shape == (2, 5, 7, 2, 8)
    assert cache.numel() * cache.element_size() == 5 * backend.bytes_per_block()


@pytest.mark.triton
def test_scratch_memory_is_bounded_whatever_the_largest_length() -> None:
    backend = TritonAttention(make_spec(heads=32, kv_heads=8, head_dim=128))
    assert 0 < backend.scratch_bytes(LIMITS) <= SCRATCH_BYTES
    assert backend.scratch_bytes(replace(LIMITS, max_model_len=1 << 20)) == backend.scratch_bytes(LIMITS)


@pytest.mark.triton
def test_scratch_memory_is_what_was_told_and_stays_where_it_is() -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [3, 600])
    backend = TritonAttention(rows.spec)
    backend.step_fields(rows.limits)
    backend.allocate(rows.num_blocks)
    scratch = backend.scratch
    assert scratch is not None
    assert sum(part.numel() * part.element_size() for part in scratch) == backend.scratch_bytes(rows.limits)
    rows.plan(backend, [(0, 0, 3), (1, 0, 600)])
    backend.allocate(rows.num_blocks)
    assert [part.data_ptr() for part in backend.scratch or ()] == [part.data_ptr() for part in scratch]


@pytest.mark.triton
@pytest.mark.parametrize("padding", [0, 5])
def test_decode_steps_have_the_same_launches_whatever_their_lengths(padding: int) -> None:
    """A captured step keeps its launches; only what its arrays hold is new."""
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [3000, 1, 300])
    backend = TritonAttention(rows.spec)
    assert backend.graphs is GraphSupport.DECODE
    short = rows.plan(backend, [(0, 0, 1), (1, 0, 1), (2, 0, 1)], padding=padding)
    long = rows.plan(backend, [(0, 2999, 3000), (1, 0, 1), (2, 299, 300)], padding=padding)
    assert (
        (short.small, short.merge_small, short.waves)
        == (long.small, long.merge_small, long.waves)
        == (
            True,
            True,
            [],
        )
    )


@pytest.mark.triton
def test_the_first_step_launches_all_kernels_so_that_no_later_one_waits_for_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = PagedRows(make_spec(heads=4, kv_heads=2), [3])
    backend = TritonAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "asyncllm.kernels.triton.paged_attention.paged_attention",
        lambda *arguments: launched.append(arguments[-3:]),
    )
    for window in (None, 2, 2):
        rows.run(backend, cache, [(0, 0, 1)], window=window)
    assert launched == [(True, True, [True]), (True, True, [True]), (True, True, [])]


@pytest.mark.triton
def test_the_operators_say_what_they_write_and_run_on_tensors_without_memory() -> None:
    from asyncllm.kernels.triton.paged_attention import kv_write, paged_attention

    def written(operator: torch._ops.OpOverload) -> list[str]:
        return [arg.name for arg in operator._schema.arguments if arg.alias_info and arg.alias_info.is_write]

    assert written(paged_attention) == ["out", "part_out", "part_stat"]
    assert written(kv_write) == ["cache"]
    with FakeTensorMode():
        key = torch.empty(3, 2, 8)
        assert kv_write(key, key, torch.empty(2, 4, 4, 2, 8), torch.empty(3, dtype=torch.int64)) is None


@pytest.mark.triton
def test_a_token_without_a_slot_is_not_written() -> None:
    backend = TritonAttention(make_spec(heads=2, kv_heads=2))
    [cache] = backend.allocate(3)
    qkv = torch.arange(1.0, 1 + 3 * 48).view(3, 6, 8)  # heads of queries, keys and values in one projection
    from asyncllm.kernels.triton.paged_attention import kv_write

    kv_write(qkv[:, 2:4], qkv[:, 4:], cache, torch.tensor([5, -1, 11]))
    keys, values = cache.flatten(1, 2)
    assert torch.equal(keys[[5, 11]], qkv[[0, 2], 2:4])
    assert torch.equal(values[[5, 11]], qkv[[0, 2], 4:])
    assert torch.count_nonzero(cache) == 2 * 2 * 16
