"""Masks of allowed tokens, applied to logits: what a grammar excludes becomes minus infinity.

A mask is bytes: bit i (of byte i // 8) is set where token i may be drawn. They come from the host with each step.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncllm.sampling.upload import Upload

__all__ = ["TokenMasks"]

FEW = 1 / 16
"""Share of tokens below which single ones are moved, which then takes less time than a pass over all."""

_ALLOWED = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDENDS = np.where(_ALLOWED == 1, np.float32(0), np.float32(-np.inf))  # [256, 8]: what each mask byte adds to 8 logits


class TokenMasks:
    """The masks of some rows of a step: those in ``row_to_mask``."""

    def __init__(self, row_to_mask: Mapping[int, bytes], upload: Upload) -> None:
        self._row_to_mask = row_to_mask
        self._upload = upload

    def apply(self, logits: torch.Tensor) -> None:
        """Exclude in ``logits`` [R, V] float32, in place, what the masks do not allow.

        On a CPU 10 to 45 µs a row of 49,152; elsewhere a copy of V / 8 bytes a row and no wait for the device.
        """
        if logits.device.type != "cpu":
            self.apply_on_device(logits)
            return
        for row, mask in self._row_to_mask.items():
            _exclude(logits[row].numpy(), np.frombuffer(mask, np.uint8))

    def apply_on_device(self, logits: torch.Tensor) -> None:
        """Do the same by operations of torch alone, on any device."""
        masks = np.stack([np.frombuffer(mask, np.uint8) for mask in self._row_to_mask.values()])
        bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
        packed = self._upload(masks)  # [M, V / 8]
        allowed = torch.bitwise_right_shift(packed.unsqueeze(2), bits).bitwise_and_(1).view(len(masks), -1)  # [M, V]
        rows = self._upload(np.array(list(self._row_to_mask), np.int64))
        kept = logits.index_select(0, rows).masked_fill_(allowed[:, : logits.shape[1]] == 0, -torch.inf)
        logits.index_copy_(0, rows, kept)


def _exclude(logits: npt.NDArray[np.float32], mask: npt.NDArray[np.uint8]) -> None:
    """Exclude in one row, ``logits`` [V], by what is cheapest for the number of tokens that are left."""
    vocab_size = len(logits)
    allowed = np.unpackbits(mask, count=vocab_size, bitorder="little").view(np.bool_)
    num_allowed = np.count_nonzero(allowed)
    if num_allowed < vocab_size * FEW:
        kept = np.flatnonzero(allowed)
        values = logits[kept]
        logits.fill(-np.inf)
        logits[kept] = values
    elif num_allowed > vocab_size * (1 - FEW):
        np.copyto(logits, -np.inf, where=np.logical_not(allowed, out=allowed))
    else:
        np.add(logits, _ADDENDS[mask].reshape(-1)[:vocab_size], out=logits)
