"""Drawing tokens as a torch operator, ``asyncllm::draw_tokens``, and how wide its passes over a row are.

What is drawn and how is in :mod:`asyncllm.kernels.triton.sample_kernels`.
"""

from __future__ import annotations

import torch
import triton

from asyncllm.kernels.triton.operators import define_operator
from asyncllm.kernels.triton.sample_kernels import draw_kernel

__all__ = ["draw_tokens"]

LANES = 1024  # numbers that a pass looks at side by side: each has sums of its own
DEPTH = 4  # and one below the other: loads in flight
NUMBERS_PER_WARP = 512


def _run_draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocabulary = logits.shape
    token_ids, best = _fake_draw_tokens(logits, temperature, top_k, top_p, min_p, number)
    lanes = min(LANES, triton.next_power_of_2(vocabulary))
    depth = DEPTH if vocabulary > lanes else 1
    draw_kernel[(num_rows,)](
        token_ids,
        best,
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        number,
        torch.empty((num_rows, lanes * depth), dtype=torch.float32, device=logits.device),
        torch.empty((num_rows, lanes * depth), dtype=torch.int32, device=logits.device),
        vocabulary,
        logits.stride(0),
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        min_p.stride(0),
        number.stride(0),
        LANES=lanes,
        DEPTH=depth,
        num_warps=min(max(lanes * depth // NUMBERS_PER_WARP, 1), 16),
        enable_fp_fusion=False,
    )
    return token_ids, best


def _fake_draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]
    return logits.new_empty((num_rows,), dtype=torch.int64), logits.new_empty((num_rows,))


draw_tokens = define_operator(
    "draw_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor number)"
    " -> (Tensor, Tensor)",
    _run_draw_tokens,
    _fake_draw_tokens,
)
"""Return a token of each row of ``logits`` [R, V] (float32, rows may be strided) and the greatest logits.

Columns [R], of any stride: ``temperature`` (0: the first greatest), ``top_k`` (int32; 0: all), ``top_p``, ``min_p``,
and ``number`` (float64), uniform in [0, 1). The results are int64 [R] and float32 [R].
"""
