"""Changes to logits before the draw: bias, allowed ids, bad words, penalties, no end before ``min_tokens``; in order.

Nothing is counted from step to step: bad words and penalties read the row's tokens from the persistent batch each time:
there is no state to lose in a preemption. Penalties cost a gather and a scatter over the tokens of the rows that ask.
All rows are changed at once through flat indices ``row * V + token``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.sampling.bad_words import BadWords

if TYPE_CHECKING:
    from asyncllm.sampling.upload import Upload
    from asyncllm.wire.messages import EngineSampling

__all__ = ["Adjustments", "TokenHistory"]

Int64 = npt.NDArray[np.int64]

LARGEST = float(np.finfo(np.float32).max)  # infinity would make nan of a logit that is 0
SMALLEST = float(np.finfo(np.float32).tiny)  # zero would make nan of one that is minus infinity


@dataclass(slots=True)
class TokenHistory:
    """The tokens of the rows that sample: ``tokens[slots[row], :num_tokens[row]]``, prompt first."""

    tokens: torch.Tensor  # [slots, max tokens], int64, on the device
    slots: Int64
    num_prompt_tokens: Int64
    num_tokens: Int64
    uniforms: torch.Tensor | None = None  # [rows] float64 in [0, 1), on the device; None: whoever draws makes them

    @property
    def positions(self) -> Int64:
        """Return the output position that each row is about to draw."""
        return self.num_tokens - self.num_prompt_tokens


class Adjustments:
    """The changes that some rows of a step ask for; made once while the rows stay the same."""

    def __init__(
        self,
        row_to_sampling: dict[int, EngineSampling],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        upload: Upload,
    ) -> None:
        self._vocab_size = vocab_size
        self._upload = upload
        rows = np.array(list(row_to_sampling), np.int64)
        samplings = list(row_to_sampling.values())
        self._bias_cells = self._cells(rows, [list(sampling.logit_bias) for sampling in samplings])
        bias = [bias for sampling in samplings for bias in sampling.logit_bias.values()]
        self._bias = upload(np.array(bias, np.float32))
        allowed = [sampling.allowed_token_ids for sampling in samplings]
        self._allowed_rows = self._upload(rows[[bool(ids) for ids in allowed]])
        self._allowed_cells = self._cells(rows, allowed)
        words = [(row, word) for row, sampling in row_to_sampling.items() for word in sampling.bad_words]
        self._bad_words = BadWords(words, vocab_size=vocab_size, upload=upload) if words else None
        self._repetition = _rows_of(rows, [s.repetition_penalty for s in samplings], neutral=1.0)
        self._frequency = _rows_of(rows, [s.frequency_penalty for s in samplings], neutral=0.0)
        self._presence = _rows_of(rows, [s.presence_penalty for s in samplings], neutral=0.0)
        self._min_tokens = np.array([sampling.min_tokens for sampling in samplings], np.int64)
        self._rows = rows
        self._end_ids = [
            [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)] for sampling in samplings
        ]

    @staticmethod
    def wanted(sampling: EngineSampling) -> bool:
        """Return whether ``sampling`` asks for any change."""
        return bool(
            sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_words
            or sampling.min_tokens
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
        )

    def apply(self, logits: torch.Tensor, history: TokenHistory) -> None:
        """Change ``logits`` [R, V] (contiguous) in place."""
        flat = logits.view(-1)
        if len(self._bias):
            flat.index_add_(0, self._bias_cells, self._bias)
        if len(self._allowed_rows):
            kept = flat.index_select(0, self._allowed_cells)
            logits.index_fill_(0, self._allowed_rows, -torch.inf)
            flat.index_copy_(0, self._allowed_cells, kept)
        if self._bad_words is not None:
            self._bad_words.apply(flat, history)
        self._penalize(flat, history)
        early = history.positions[self._rows] < self._min_tokens
        if early.any():
            ids = [ids if is_early else [] for ids, is_early in zip(self._end_ids, early.tolist(), strict=True)]
            flat.index_fill_(0, self._cells(self._rows, ids), -torch.inf)

    def _penalize(self, flat: torch.Tensor, history: TokenHistory) -> None:
        rows, penalty = self._repetition
        if len(rows):
            cells, nth = self._seen(rows, history, prompt=True)
            factor = self._upload(penalty).index_select(0, nth)
            seen = flat.index_select(0, cells)
            # A cell may stand many times; each copy writes the same value.
            changed = torch.where(seen > 0, seen / factor, seen * factor)
            flat.index_copy_(0, cells, changed.clamp_(max=LARGEST))
        rows, penalty = self._frequency
        if len(rows):
            cells, nth = self._seen(rows, history, prompt=False)
            flat.index_add_(0, cells, self._upload(-penalty).index_select(0, nth))
        rows, penalty = self._presence
        if len(rows):
            cells, nth = self._seen(rows, history, prompt=False)
            flat.index_copy_(0, cells, flat.index_select(0, cells) - self._upload(penalty).index_select(0, nth))

    def _seen(self, rows: Int64, history: TokenHistory, *, prompt: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cells of the tokens that ``rows`` hold, with repeats, and the place in ``rows`` of each."""
        begin = np.zeros_like(rows) if prompt else history.num_prompt_tokens[rows]
        count = history.num_tokens[rows] - begin
        nth = np.repeat(np.arange(len(rows)), count)
        column = np.arange(len(nth)) - np.repeat(np.cumsum(count) - count - begin, count)
        stride = history.tokens.shape[1]
        places = self._upload(history.slots[rows][nth] * stride + column)
        tokens = history.tokens.view(-1).index_select(0, places)
        return tokens + self._upload(rows[nth] * self._vocab_size), self._upload(nth)

    def _cells(self, rows: Int64, ids: list[list[int]]) -> torch.Tensor:
        counts = [len(row_ids) for row_ids in ids]
        tokens = np.array([token for row_ids in ids for token in row_ids], np.int64)
        return self._upload(np.repeat(rows, counts) * self._vocab_size + tokens)


def _rows_of(rows: Int64, values: list[float], *, neutral: float) -> tuple[Int64, npt.NDArray[np.float32]]:
    column = np.array([_in_float32(value) for value in values], np.float32)
    chosen = column != np.float32(neutral)
    return rows[chosen], column[chosen]


def _in_float32(value: float) -> float:
    """Return ``value`` where float32 has it, neither infinity nor, for what is not 0, zero."""
    return min(max(value, SMALLEST), LARGEST) if value > 0 else value
