"""Rows with drafts (:mod:`asyncllm.wire.step`): what they draw, and what of it counts.

A row with d drafts draws 1 + d tokens, each from the tokens up to its place, drafts among them, at the number of its
own output position: all that a request can ask of a draw is applied as it would be there without drafts. The draws of
a row stand next to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from asyncllm.wire.step import SchedulerOutput

__all__ = ["DraftedDraws", "RowTokens", "confirm", "spread"]

Int64 = npt.NDArray[np.int64]


class DraftedDraws(NamedTuple):
    """The draws of a step, R of them in the B rows that draw."""

    rows: Int64  # [R] place of the row among those of the step
    num_before: Int64  # [R] tokens that the draw follows
    flat_places: Int64  # [R] the last of these in the flat batch


class RowTokens(NamedTuple):
    """What counts of the draws of one row."""

    row: int
    slot: int
    token_ids: list[int]  # empty: the row has no valid token
    is_finite: bool  # no draw was from logits that are no numbers; else nothing counts
    has_drafts: bool


def spread(step: SchedulerOutput, has_caught_up: npt.NDArray[np.bool_], seq_lens: Int64, ends: Int64) -> DraftedDraws:
    """Return the draws of ``step``: per row whether it draws, its tokens, and the end of its part of the flat batch."""
    slot_to_count = {slot: 1 + len(ids) for slot, ids in zip(step.draft_slots, step.draft_token_ids, strict=True)}
    counts = np.array([slot_to_count.get(slot, 1) for slot in step.slots], np.int64) * has_caught_up
    rows = np.repeat(np.arange(len(counts)), counts)
    back = np.repeat(np.cumsum(counts), counts) - np.arange(len(rows))  # 1 for the last draw of a row
    return DraftedDraws(rows, seq_lens[rows] + 1 - back, ends[rows] - back)


def confirm(step: SchedulerOutput, rows: Int64, drawn: Int64, best: npt.NDArray[np.float32]) -> list[RowTokens]:
    """Return the tokens of each row that drew: the first, and what follows drafts that are what was drawn.

    ``best`` [R], the largest logit of each draw, is minus infinity where nothing was left to draw.
    """
    slot_to_drafts = dict(zip(step.draft_slots, step.draft_token_ids, strict=True))
    found: list[RowTokens] = []
    firsts: list[int] = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
    at: list[int] = rows[firsts].tolist()
    for first, row in zip(firsts, at, strict=True):
        slot = step.slots[row]
        drafts = slot_to_drafts.get(slot, [])
        draws = slice(first, first + 1 + len(drafts))
        token_ids: list[int] = drawn[draws].tolist()
        count = 1 + next((nth for nth, draft in enumerate(drafts) if draft != token_ids[nth]), len(drafts))
        nothing_left = best[draws] == -np.inf
        is_finite = bool((np.isfinite(best[draws]) | nothing_left).all())
        if nothing_left.any():  # where a wrong draft led to is nobody's failure; where a right one did is found again
            count = min(count, int(nothing_left.argmax()))
        found.append(RowTokens(row, slot, token_ids[: count if is_finite else 0], is_finite, bool(drafts)))
    return found
