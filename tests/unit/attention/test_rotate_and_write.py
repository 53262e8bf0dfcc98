"""Backends that rotate and store in one operation give what the two operations of the seam give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.attention.base import AttentionBackend, StepLimits
from asyncllm.attention.cpu import CpuAttention
from asyncllm.attention.flash_attn import FlashAttention
from asyncllm.attention.reference import ReferenceAttention
from asyncllm.attention.triton import TritonAttention
from asyncllm.kernels.fused import HeadNorms, Rotation
from asyncllm.layers.rotary import RotaryEmbedding
from tests.support import flash_attn_contract as contract
from tests.support.attention import make_batch, make_spec, put_on_device

LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["torch", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize(
    "cls", [CpuAttention, ReferenceAttention, pytest.param(TritonAttention, marks=pytest.mark.triton)]
)
def test_one_operation_gives_what_two_give(
    cls: type[AttentionBackend], kind: str, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCLLM_FUSED_KERNELS", kind)
    spec = make_spec(heads=4, kv_heads=2, head_dim=12)
    batch = make_batch([3, 1], [5, 4], [[2, 5], [3]], spec.block_size)
    backend = cls(spec)
    put_on_device(batch, backend.step_fields(LIMITS))
    plan = backend.plan(batch)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 8, 12, generator=generator)
    norms = HeadNorms(*torch.randn(2, 12, generator=generator), 1e-6) if normed else None
    rotary = RotaryEmbedding(
        12, 64, {"rope_type": "default", "rope_theta": 1e4}, dtype=torch.float32, device=torch.device("cpu")
    )
    rotation = rotary(torch.from_numpy(batch.positions))

    [found], [expected] = backend.allocate(6), backend.allocate(6)
    query = backend.rotate_and_write(heads, rotation, found, plan, norms)
    expected_query = AttentionBackend.rotate_and_write(backend, heads, rotation, expected, plan, norms)
    for ours, theirs in zip((query, *found), (expected_query, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert np.array_equal(ours != 0, theirs != 0)


@pytest.mark.triton
def test_flash_attention_stores_in_the_same_places() -> None:
    """Its plan needs a package; where tokens go, no more than their slots."""
    with contract.installed("3"):
        backend = FlashAttention(make_spec(heads=4, kv_heads=2, head_dim=16, block_size=16, dtype=torch.bfloat16))
    plan: Any = SimpleNamespace(kv_slots=torch.tensor([9, 20, 21, 14]))
    heads = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = Rotation(torch.ones(4, 1, 1, 8).bfloat16(), torch.zeros(4, 1, 2, 8).bfloat16())
    found, expected = torch.zeros(2, 2, 6, 16, 2, 16, dtype=torch.bfloat16)
    query = backend.rotate_and_write(heads, rotation, found, plan)
    assert torch.equal(query, AttentionBackend.rotate_and_write(backend, heads, rotation, expected, plan))
    assert torch.equal(found, expected)
    assert found.any(4).sum() == 2 * 4 * 2
