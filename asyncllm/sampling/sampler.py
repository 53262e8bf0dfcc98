"""Draw one token per row from its logits.

Order: adjustments (bias, allowed ids, penalties, ``min_tokens``), temperature, top-k, top-p, min-p, then the inverse of
the cumulative distribution at the row's uniform number. Nothing is drawn from a state, and each row is computed by
operations over that row alone, by a path that its own parameters choose: its token cannot depend on its neighbours.

A token of probability zero is never drawn: the first one whose cumulative sum *exceeds* u * total has a positive share.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncllm.sampling.columns import FILTER_WINDOWS, RandomRows, SamplingMetadata
from asyncllm.sampling.logprobs import LogprobTensors, compute_logprobs
from asyncllm.sampling.rng import uniforms

if TYPE_CHECKING:
    from asyncllm.sampling.penalties import TokenHistory

__all__ = ["Sampler", "SamplerOutput"]

SLICE_ELEMENTS = 1 << 16  # on a CPU, elements drawn from at once: their float64 sums stay in a core's own cache


@dataclass(slots=True)
class SamplerOutput:
    """Tokens of a step, still on the device."""

    token_ids: torch.Tensor  # [R] int64
    best_logits: torch.Tensor  # [R] largest logit after adjustments; not finite where the row has no valid token
    logprobs: LogprobTensors | None


class Sampler:
    """Stateless."""

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata, history: TokenHistory) -> SamplerOutput:
        """Return a token for each row of ``logits`` [R, V] float32, which may be changed in place."""
        raw = None if metadata.logprob_rows is None else logits.index_select(0, metadata.logprob_rows)
        if metadata.adjustments is not None:
            logits = logits.contiguous()
            metadata.adjustments.apply(logits, history)
        best = logits.amax(1)
        token_ids = argmax(logits) if metadata.all_greedy else self._draw_rows(logits, metadata, history)
        logprobs = None
        if raw is not None and metadata.logprob_rows is not None:
            chosen = token_ids.index_select(0, metadata.logprob_rows)
            logprobs = compute_logprobs(raw, chosen, with_top=max(metadata.num_logprobs) > 0)
        return SamplerOutput(token_ids, best, logprobs)

    def _draw_rows(self, logits: torch.Tensor, metadata: SamplingMetadata, history: TokenHistory) -> torch.Tensor:
        numbers = uniforms(metadata.seeds, metadata.sample_indices, history.positions)
        u = torch.from_numpy(numbers).to(logits.device).unsqueeze(1)  # [R, 1] float64
        group = metadata.random_rows[0]
        if group.rows is None:
            return draw(logits, group, u)
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if metadata.greedy_rows is not None and len(metadata.greedy_rows):
            rows = metadata.greedy_rows
            token_ids.index_copy_(0, rows, argmax(logits.index_select(0, rows)))
        for group in metadata.random_rows:
            rows = group.rows
            assert rows is not None
            drawn = draw(logits.index_select(0, rows), group, u.index_select(0, rows))
            token_ids.index_copy_(0, rows, drawn)
        return token_ids


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first largest column of each row of ``logits`` [R, V]."""
    if logits.device.type == "cpu":  # numpy's is vectorised: 14 µs against torch's 170 µs for 256 rows of 1024
        return torch.from_numpy(logits.numpy().argmax(1))
    return logits.argmax(1)


def draw(logits: torch.Tensor, group: RandomRows, u: torch.Tensor) -> torch.Tensor:
    """Return a token of each row of ``logits`` [R, V] at the numbers ``u`` [R, 1]."""
    if group.temperature is not None:
        logits = logits / group.temperature
    if not group.window:
        return _by_slices(logits, group, u)
    return _draw_filtered(logits, group, u)


def _draw_filtered(logits: torch.Tensor, group: RandomRows, u: torch.Tensor) -> torch.Tensor:
    """Draw with top-k or top-p: from a window of the most likely tokens, from a wider one where that is too narrow."""
    top_k, top_p, min_p = group.top_k, group.top_p, group.min_p
    assert top_k is not None
    assert top_p is not None
    vocab_size = logits.shape[1]
    token_ids, complete = _draw_in_window(logits, top_k, top_p, min_p, u, group.window)
    for window in (*(size for size in FILTER_WINDOWS if group.window < size < vocab_size), vocab_size):
        # The host reads the device here: on a GPU a kernel without a sort replaces the window and its retry.
        if complete is None or bool(complete.all()):
            break
        rows = torch.nonzero(~complete).squeeze(1)
        redrawn, done = _draw_in_window(
            logits.index_select(0, rows),
            top_k.index_select(0, rows),
            top_p.index_select(0, rows),
            None if min_p is None else min_p.index_select(0, rows),
            u.index_select(0, rows),
            window,
        )
        token_ids.index_copy_(0, rows, redrawn)
        complete = None if done is None else complete.index_copy_(0, rows, done)
    return token_ids


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return, per row of ``weights`` [R, V] >= 0, the first column whose cumulative sum exceeds u * total; [R, 1].

    ``u`` [R, 1] float64 in [0, 1). A row without a finite positive total gives some column within the row.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)


def _by_slices(logits: torch.Tensor, group: RandomRows, u: torch.Tensor) -> torch.Tensor:
    """Draw over the whole vocabulary in its own order: no top-k, no top-p."""
    num_rows, vocab_size = logits.shape
    step = max(1, SLICE_ELEMENTS // vocab_size) if logits.device.type == "cpu" else num_rows
    drawn: list[torch.Tensor] = []
    for first in range(0, num_rows, step):
        rows = slice(first, first + step)
        weights = torch.softmax(logits[rows], 1)
        if group.min_p is not None:
            weights = weights.masked_fill_(weights < group.min_p[rows] * weights.amax(1, keepdim=True), 0.0)
        drawn.append(inverse_cdf(weights, u[rows]))
    return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).squeeze(1)


def _draw_in_window(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
    u: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw from the ``window`` most likely tokens; also return which rows did not need more of them, ``None``: all.

    A row with a top-k is complete: its window holds it. One with top-p alone is complete if the window has that mass.
    """
    whole = window >= logits.shape[1]
    if whole:
        values, token_ids = torch.sort(logits, dim=1, descending=True, stable=True)
    else:
        values, token_ids = logits.topk(window, 1)
    best = values[:, :1]
    weights = torch.sub(values, best).exp_()
    rank = torch.arange(values.shape[1], device=logits.device)
    weights.masked_fill_((rank >= top_k) & (top_k > 0), 0.0)
    too_unlikely = None if min_p is None else weights < min_p  # the most likely token has weight 1
    cumulative = weights.cumsum(1, dtype=torch.float64)
    mass = cumulative[:, -1:]
    total = mass
    if not whole:  # top-p is a share of what top-k left, or of the whole vocabulary
        vocabulary_mass = torch.sub(logits.logsumexp(1, keepdim=True), best).exp_().to(torch.float64)
        total = torch.where(top_k > 0, mass, vocabulary_mass)
    wanted = torch.mul(total, top_p)
    weights.masked_fill_(cumulative - weights >= wanted, 0.0)
    if too_unlikely is not None:
        weights.masked_fill_(too_unlikely, 0.0)
    drawn = token_ids.gather(1, inverse_cdf(weights, u)).squeeze(1)
    return drawn, None if whole else ((top_k > 0) | (mass >= wanted)).squeeze(1)
