"""Token sequences that the output must not hold: the last token of each is excluded where the others end the output.

All words of all rows are one table; what a word needs of the past is read from the persistent batch at each step, on
the device, so that nothing is kept from step to step. A word of one token is one with nothing before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.sampling.penalties import TokenHistory
    from asyncllm.sampling.upload import Upload

__all__ = ["BadWords"]

ANY = -1  # in the place of a prefix that is shorter than the longest one


class BadWords:
    """The words of some rows of a step; made once while the rows stay the same."""

    def __init__(self, words: Sequence[tuple[int, list[int]]], *, vocab_size: int, upload: Upload) -> None:
        """``words`` are pairs of a row and a sequence of at least one token id of the vocabulary."""
        self._upload = upload
        self._rows = np.array([row for row, _ in words], np.int64)
        self._num_before = np.array([len(ids) - 1 for _, ids in words], np.int64)
        width = int(self._num_before.max())
        before = np.full((len(words), width), ANY, np.int64)
        for nth, (_, ids) in enumerate(words):
            before[nth, width - len(ids) + 1 :] = ids[:-1]
        self._before = self._upload(before)  # [W, width], right-aligned
        last = np.array([ids[-1] for _, ids in words], np.int64)
        self._cells = self._upload(self._rows * vocab_size + last)  # [W]
        self._back = np.arange(width, 0, -1)  # distance of each column from the token to be drawn

    def apply(self, flat: torch.Tensor, history: TokenHistory) -> None:
        """Exclude what would complete a word; ``flat`` [R * V] are the logits of the step's rows."""
        ready = history.positions[self._rows] >= self._num_before  # others would reach into the prompt
        if not ready.any():
            return
        nth = np.flatnonzero(ready)
        rows, chosen = self._rows[nth], self._upload(nth)
        ends = history.slots[rows] * history.tokens.shape[1] + history.num_tokens[rows]
        places = np.maximum(ends[:, None] - self._back, 0)  # columns that are not compared may lie before the row
        before = self._before.index_select(0, chosen)
        tail = history.tokens.view(-1).index_select(0, self._upload(places.ravel())).view(before.shape)
        complete = ((tail == before) | (before == ANY)).all(1)
        # Added, not written: two words may end in the same cell, of which only one is complete.
        excluded = torch.zeros(len(nth), device=flat.device).masked_fill_(complete, -torch.inf)
        flat.index_add_(0, self._cells.index_select(0, chosen), excluded)
