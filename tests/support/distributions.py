"""What the sampling parameters make of a row of logits, and whether draws follow it.

False alarms: a test that compares with :data:`ALARM` fails a right sampler with probability 1e-6, and there are about
two hundred of them, so one in five thousand choices of seeds would fail. The seeds are fixed, and these do not; what
is drawn for them never changes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.kernels.base import Kernels
from asyncllm.sampling.columns import SamplingColumns
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.sampler import Sampler
from asyncllm.wire.messages import EngineSampling

Float64 = npt.NDArray[np.float64]

ALARM = 1e-6
NUM_DRAWS, ROWS_PER_CALL = 100_000, 4_000

COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product((0.6, 1.0, 1.7), (0, 7), (1.0, 0.85), (0.0, 0.1))
]


def logits_row(vocab_size: int = 16) -> torch.Tensor:
    """Return logits without ties, the same on every machine; one token is a hundred times as likely as another."""
    places = torch.arange(vocab_size)
    return (places * 7 % vocab_size) * (5.0 / vocab_size)


def reference(logits: torch.Tensor, params: EngineSampling) -> Float64:
    """Return the distribution that ``params`` make of one row of ``logits``."""
    scaled = logits.numpy().astype(np.float64) / params.temperature
    shares = np.exp(scaled - scaled.max())
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    kept = np.zeros(len(shares), bool)
    kept[order[: params.top_k or None]] = True
    shares = np.where(kept, shares, 0) / shares[kept].sum()
    before = np.cumsum(shares[order]) - shares[order]
    kept[order[before >= params.top_p]] = False
    kept &= shares >= params.min_p * shares.max()
    return np.where(kept, shares, 0) / shares[kept].sum()


def draw(logits: torch.Tensor, params: EngineSampling, kernels: Kernels | None = None) -> npt.NDArray[np.int64]:
    """Return :data:`NUM_DRAWS` tokens: those at output positions 0, 1 … of one request whose logits never change."""
    slots = np.arange(ROWS_PER_CALL)
    columns = SamplingColumns(ROWS_PER_CALL, vocab_size=len(logits), eos_token_ids=(), upload=torch.from_numpy)
    for slot in range(ROWS_PER_CALL):
        columns.put(slot, params)
    rows, prompt_lens = logits.expand(ROWS_PER_CALL, -1), np.ones(ROWS_PER_CALL, np.int64)
    nothing = torch.zeros(ROWS_PER_CALL, 0, dtype=torch.int64)
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, NUM_DRAWS, ROWS_PER_CALL):
            history = TokenHistory(nothing, slots, prompt_lens, prompt_lens + start + slots)
            found.append(Sampler(kernels).sample(rows.clone(), columns.select(slots), history).token_ids)
    return torch.cat(found).numpy()


def chance(tokens: npt.NDArray[np.int64], shares: Float64) -> float:
    """Return how likely a right sampler gives counts as far from ``shares`` as those of ``tokens`` (chi-square test).

    0 if a token of probability zero was drawn. Cells of fewer than five expected draws are put together.
    """
    seen = np.bincount(tokens, minlength=len(shares)).astype(np.float64)
    if seen[shares == 0].any():
        return 0.0
    expected = shares * len(tokens)
    is_rare = expected < 5
    seen, expected = (np.append(cells[~is_rare], cells[is_rare].sum()) for cells in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = float(((seen - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
