"""Whether an output ends in a pattern that stands several times in a row.

The last n tokens are a pattern of p tokens, ``count`` times, exactly when each of the last ``p * (count - 1)`` tokens
equals the one p before it. So one number per p, how many in a row did, is all there is to keep: a token costs a
comparison per size of pattern, however long the output is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RepetitionWatch"]


class RepetitionWatch:
    """Watches the growing tokens of one request; those before ``start`` (the prompt) do not count."""

    __slots__ = ("_max_size", "_min_count", "_min_size", "_next", "_runs", "_start")

    def __init__(self, min_size: int, max_size: int, min_count: int, *, start: int) -> None:
        self._min_size = min_size
        self._max_size = max_size
        self._min_count = min_count
        self._start = start
        self._next = start  # place of the first token that was not looked at
        self._runs = [0] * (max_size + 1)  # by size of the pattern

    def repeats(self, token_ids: Sequence[int]) -> bool:
        """Return whether ``token_ids``, which only grow from call to call, end in a repeated pattern."""
        found, runs = False, self._runs
        for place in range(self._next, len(token_ids)):
            token_id, found = token_ids[place], False
            for size in range(self._min_size, min(self._max_size, place - self._start) + 1):
                if token_ids[place - size] != token_id:
                    runs[size] = 0
                    continue
                runs[size] += 1
                if runs[size] >= size * (self._min_count - 1):
                    found = True
        self._next = len(token_ids)
        return found
