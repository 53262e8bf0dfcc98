"""Modules ``flash_attn``, ``flash_attn_interface`` and ``flash_attn.cute`` in plain torch: the packages' contract.

They have the packages' functions and signatures, refuse what the packages refuse, and compute what they compute, on any
device. So an adapter that works with them calls the real ones rightly; what they leave out of a package's options they
refuse loudly. The checks were read in:

    2   flash-attn 2.8.3.post2: flash_attn/flash_attn_interface.py, csrc/flash_attn/flash_api.cpp
        (mha_varlen_fwd, mha_fwd_kvcache)
    3   hopper/flash_attn_interface.py of the same archive; hopper/flash_api.cpp (mha_fwd) of the repository
        Dao-AILab/flash-attention at 0251105a2fb1, which the archive does not have
    4   flash-attn-4 4.0.0b36: flash_attn/cute/interface.py (_flash_attn_fwd, _validate_head_dims)

The attention itself is one operator with a fake implementation, which graph emulation and fake tensors need.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from asyncllm.attention import flash_attn_packages

CALLS: list[tuple[str, dict[str, Any]]] = []
"""Function and the numbers it was given, of every call since :func:`installed`."""


# ------------------------------------------------------------------------------------------------------- the operator
def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    left: int,
) -> torch.Tensor:
    """Return causal attention [T, H, D], masked from the bottom right; rows without keys or queries give zeros."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    group = query.shape[1] // keys.shape[2]
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or not length:
            continue
        pages = tables[row, : -(-length // keys.shape[1])].long()
        k, v = (part[pages].flatten(0, 1)[:length].double() for part in (keys, values))
        k, v = (part.repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), k) * scale
        place = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
        seen = place >= 0 if left < 0 else (place >= 0) & (place <= left)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


_torch_library: Any = torch.library
_library = _torch_library.Library("flash_attn_contract", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor query_start, Tensor seq_lens, Tensor tables, float scale,"
    " int left) -> Tensor"
)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_torch_library.register_fake(
    "flash_attn_contract::attend", lambda query, *_: query.new_empty(query.shape), lib=_library
)
attend = torch.ops.flash_attn_contract.attend.default


# --------------------------------------------------------------------------------------------------------- the checks
def check(condition: bool, text: str) -> None:
    """TORCH_CHECK."""
    if not condition:
        raise RuntimeError(text)


def check_device(like: torch.Tensor, **tensors: torch.Tensor) -> None:
    """CHECK_DEVICE: there all are on CUDA, here all are where the query is."""
    for name, tensor in tensors.items():
        check(tensor.device == like.device, f"{name} must be on CUDA")


def check_shape(tensor: torch.Tensor, name: str, *shape: int) -> None:
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}")


def check_int32(name: str, tensor: torch.Tensor) -> None:
    check(tensor.dtype == torch.int32, f"{name} must have dtype int32")


def check_unused(**options: Any) -> None:
    """Refuse what this module leaves out."""
    for name, value in options.items():
        assert value is None or value in (0, False), f"the contract does not have {name}"


def check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, table_name: str) -> None:
    """Check what versions 2 and 3 check of paged inputs alike."""
    check(q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
    check(k.dtype == q.dtype, "query and key must have the same dtype")
    check(v.dtype == q.dtype, "query and value must have the same dtype")
    check_device(q, k=k, v=v, **{table_name: table})
    for tensor in (q, k, v):
        check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    check(table.dtype == torch.int32, f"{table_name} must have dtype torch.int32")
    check(table.stride(-1) == 1, f"{table_name} must have contiguous last dimension")
    check(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")


def check_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, batch: int) -> None:
    check_shape(k, "k", k.shape[0], k.shape[1], k.shape[2], q.shape[-1])
    check_shape(v, "v", *k.shape)
    check_shape(table, "block_table", batch, table.shape[1])


def left_of(causal: bool, window_size: Sequence[int | None]) -> int:
    """Return how many tokens before its own a query sees, -1 for all."""
    assert causal, "the contract has causal attention only"
    left, right = window_size
    assert right in (-1, 0, None), "the contract has no tokens after a query's own"
    return -1 if left is None else left


def every(num_rows: int, num_queries: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_queries


# ------------------------------------------------------------------------------------------------------- version 2
def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    check_unused(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    assert block_table is not None, "the contract has paged keys and values only"
    CALLS.append(("2 varlen", {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}))
    check_inputs(q, k, v, block_table, "block_table")
    check_device(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, sums in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_int32(name, sums)
        check(sums.is_contiguous(), f"{name} must be contiguous")
    check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    batch = cu_seqlens_q.numel() - 1
    check(batch > 0, "batch size must be positive")
    check(q.shape[2] % 8 == 0, "query, key, value, and out_ must have a head_size that is a multiple of 8")
    check_pages(q, k, v, block_table, batch)
    check_shape(cu_seqlens_k, "cu_seqlens_k", batch + 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    return attend(q, k, v, cu_seqlens_q, lens, block_table, scale, left_of(causal, window_size))


def flash_attn_with_kvcache_2(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    check_unused(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    check_unused(cache_leftpad=cache_leftpad, softcap=softcap, alibi=alibi_slopes, lse=return_softmax_lse)
    assert block_table is not None, "the contract has paged keys and values only"
    CALLS.append(("2 kvcache", {"num_splits": num_splits}))
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    check_inputs(q, k_cache, v_cache, block_table, "block_table")
    batch, num_queries = q.shape[:2]
    check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    check(batch > 0, "batch size must be positive")
    check(num_splits <= 128, "num_splits > 128 not supported")
    check_pages(q, k_cache, v_cache, block_table, batch)
    check_device(q, seqlens_k=cache_seqlens)
    check_int32("seqlens_k", cache_seqlens)
    check(cache_seqlens.is_contiguous(), "seqlens_k must be contiguous")
    check_shape(cache_seqlens, "seqlens_k", batch)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left = left_of(causal, window_size)
    starts = every(batch, num_queries, q.device)
    return attend(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, scale, left).view(q.shape)


# ------------------------------------------------------------------------------------------------------- version 3
def flash_attn_with_kvcache_3(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    check_unused(k=k, v=v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    check_unused(cache_leftpad=cache_leftpad, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens)
    check_unused(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    check_unused(softcap=softcap, scheduler_metadata=scheduler_metadata, lse=return_softmax_lse)
    assert page_table is not None, "the contract has paged keys and values only"
    CALLS.append(("3 kvcache", {"num_splits": num_splits, "max_seqlen_q": max_seqlen_q}))
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    check_inputs(q, k_cache, v_cache, page_table, "page_table")
    if cu_seqlens_q is None:
        batch, starts = q.shape[0], every(q.shape[0], q.shape[1], q.device)
        check_shape(q, "q", batch, *q.shape[1:3], k_cache.shape[3])
    else:
        batch, starts = cu_seqlens_q.shape[0] - 1, cu_seqlens_q
        check_device(q, cu_seqlens_q=cu_seqlens_q)
        check(cu_seqlens_q.is_contiguous(), "cu_seqlens_q must be contiguous")
        check_int32("cu_seqlens_q", cu_seqlens_q)
        check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
    check(batch == page_table.shape[0], "batch_size must be equal to batch_size_k")
    check_pages(q, k_cache, v_cache, page_table, batch)
    check_int32("seqused_k", cache_seqlens)
    check_device(q, seqused_k=cache_seqlens)
    check(cache_seqlens.is_contiguous(), "seqused_k must be contiguous")
    check_shape(cache_seqlens, "seqused_k", batch)
    check(q.shape[-1] % 8 == 0, "head_size should be a multiple of 8")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows = q.flatten(0, 1) if cu_seqlens_q is None else q
    left = left_of(causal, window_size)
    return attend(rows, k_cache, v_cache, starts, cache_seqlens, page_table, scale, left).view(q.shape)


# ------------------------------------------------------------------------------------------------------- version 4
def flash_attn_varlen_func_4(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    check_unused(qv=qv, seqused_q=seqused_q, gather_kv_indices=gather_kv_indices, learnable_sink=learnable_sink)
    check_unused(softcap=softcap, score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors)
    check_unused(aux_tensors=aux_tensors, return_lse=return_lse, scheduler_metadata=scheduler_metadata)
    CALLS.append(("4 varlen", {"num_splits": num_splits, "max_seqlen_q": max_seqlen_q}))
    assert page_table is not None, "the contract has paged keys and values only"
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert page_table.dtype == torch.int32, "page_table must be int32"
    assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
    assert page_table.shape == (batch, page_table.shape[1])
    assert k.shape == (*v.shape[:3], q.shape[-1])
    assert seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
    assert v.dtype in (torch.float16, torch.bfloat16), "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
    assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
    for sums in (cu_seqlens_q, seqused_k):
        if sums is not None:
            assert sums.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
            assert sums.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
    on = [tensor.device for tensor in (q, k, v, cu_seqlens_q, seqused_k, page_table) if tensor is not None]
    assert all(device == q.device for device in on), "inputs must be on CUDA device"
    assert q.shape[-2] % k.shape[2] == 0, "num_head must be divisible by num_head_kv"
    # The lower bound of all its devices; on 10.x it is 128 at most.
    assert q.shape[-1] in range(8, 257, 8), "head_dim must be between 8 and 256 and divisible by 8"
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    starts = every(batch, q.shape[1], q.device) if cu_seqlens_q is None else cu_seqlens_q
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rows = q.flatten(0, 1) if cu_seqlens_q is None else q
    out = attend(rows, k, v, starts, seqused_k, page_table, scale, left_of(causal, window_size))
    return out.view(q.shape), None


# -------------------------------------------------------------------------------------------------------- the modules
VERSION_TO_FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "2": (
        "flash_attn",
        {
            "flash_attn_varlen_func": flash_attn_varlen_func,
            "flash_attn_with_kvcache": flash_attn_with_kvcache_2,
        },
    ),
    "3": ("flash_attn_interface", {"flash_attn_with_kvcache": flash_attn_with_kvcache_3}),
    "4": ("flash_attn.cute", {"flash_attn_varlen_func": flash_attn_varlen_func_4}),
}


@contextmanager
def installed(*versions: str, capability: tuple[int, int] | None = (9, 0)) -> Iterator[None]:
    """Let these versions be importable, and no other; every device has this ``capability``, ``None``: it is no GPU."""
    modules: dict[str, Any] = dict.fromkeys(("flash_attn", "flash_attn_interface", "flash_attn.cute"))
    for version in sorted(versions):
        name, functions = VERSION_TO_FUNCTIONS[version]
        modules[name] = make_module(name, functions)
    if "4" in versions and modules["flash_attn"] is None:
        modules["flash_attn"] = make_module("flash_attn", {})  # a namespace package
    CALLS.clear()
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)  # not mock.patch.dict: it forgets what is imported for the first time meanwhile
    try:
        with mock.patch.object(flash_attn_packages, "capability_of", return_value=capability):
            yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def make_module(name: str, functions: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(functions)
    return module
