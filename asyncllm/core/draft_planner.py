"""Which requests get drafts in the next step, and how many: what a longer step costs all rows, and what it may save.

What each request guesses is its own :class:`~asyncllm.core.prompt_lookup.PromptLookup`'s business. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.core.request import Request

__all__ = ["DraftPlanner"]


class DraftPlanner:
    """Shares the ``step_tokens`` of a step with drafts; up to ``free_tokens`` of them cost as much as one."""

    def __init__(self, *, step_tokens: int, free_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._free_tokens = free_tokens

    def look_up(self, running: Sequence[Request]) -> dict[Request, list[int]]:
        """Return the drafts that are worth a try in the next step; none for one that should wait for its newest ids.

        Few drafts do not lengthen a step of many rows.
        """
        found: dict[Request, list[int]] = {}
        num_running = len(running)
        share = self._step_tokens // num_running - 1 if num_running else 0
        for request in running if share > 0 else ():
            lookup, token_ids, num_computed = request.lookup, request.token_ids, request.num_computed_tokens
            room = min(share, request.max_num_tokens - num_computed - 2)  # with the last token there is none to guess
            if lookup is None or room < 1 or not request.border or request.num_drafts_out:
                continue
            if len(token_ids) > num_computed:
                if drafts := lookup.propose(token_ids, room):
                    found[request] = drafts
            elif lookup.is_worth_waiting(token_ids):
                found[request] = []
        num_drafts = sum(len(drafts) or 1 for drafts in found.values())
        is_cheap = num_running + num_drafts <= self._free_tokens
        return found if is_cheap or 2 * num_drafts >= num_running else {}
