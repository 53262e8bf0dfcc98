"""Guesses at a request's next tokens, looked up in its own: what followed the last time that its last tokens stood.

Prompt lookup (Saxena 2023), n-gram speculation: no second model, and worth something wherever an output repeats its
prompt or itself: quotes, edits of code, extracts, tables. :class:`PromptLookup` finds and counts; it does not know what
a step costs. Nothing depends on it but speed: each guess is checked by the model.

The index has the last place of each pair of tokens, and from each place the one before it with the same pair. So a
token costs one entry, and a search looks at :data:`MAX_CANDIDATES` places; the longest match wins, of equals the
latest.

How much is guessed follows from how it went: the length doubles when all of it was right, shrinks to what was, and
after wrong guesses the request pauses for 1, 3, 7 … :data:`MAX_PAUSE` tokens and wants longer matches. So what never
repeats soon costs a single draft in 64 tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_PAUSE", "PromptLookup"]

MIN_MATCH = 2
MAX_MATCH = 8  # longer ones are not told apart
MAX_CANDIDATES = 16
MAX_MISSES = 6
MAX_PAUSE = 2**MAX_MISSES - 1


class PromptLookup:
    """The lookup of one request, whose tokens only grow from call to call; at most ``max_drafts`` at a time."""

    __slots__ = (
        "_before",
        "_has_waited",
        "_latest",
        "_length",
        "_max_drafts",
        "_misses",
        "_resume_at",
        "num_accepted",
        "num_proposed",
    )

    def __init__(self, max_drafts: int) -> None:
        self.num_proposed = 0
        self.num_accepted = 0
        self._max_drafts = max_drafts
        self._length = 1  # most that are proposed next
        self._misses = 0
        self._resume_at = 0  # number of tokens from which there are proposals
        self._has_waited = False
        self._latest: dict[int, int] = {}  # pair of tokens → the last place of its second one
        self._before = [-1]  # by place: the last place before it with the same pair

    def is_worth_waiting(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens, without the newest ones, make a proposal likely once those are known."""
        self._has_waited = len(token_ids) >= self._resume_at and self._find(token_ids) >= 0
        return self._has_waited

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may follow ``token_ids``; O(new tokens)."""
        count = min(limit, self._length)
        if count < 1 or len(token_ids) < self._resume_at:
            return []
        place, has_waited = self._find(token_ids), self._has_waited
        self._has_waited = False
        if place < 0:
            if has_waited:  # a step was given away for nothing
                self._miss(len(token_ids))
            return []
        period = len(token_ids) - 1 - place  # beyond the end the pattern goes on
        if count <= period:
            return list(token_ids[place + 1 : place + 1 + count])
        return [token_ids[place + 1 + index % period] for index in range(count)]

    def learn(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        """Note how a proposal went; ``num_tokens`` are known now."""
        if num_accepted == num_proposed:
            self._length = min(self._max_drafts, 2 * self._length)
            self._misses = max(0, self._misses - 1)
        elif num_accepted:
            self._length = num_accepted
        else:
            self._miss(num_tokens)

    def _miss(self, num_tokens: int) -> None:
        self._length = max(1, self._length // 2)
        self._misses = min(self._misses + 1, MAX_MISSES)
        self._resume_at = num_tokens + 2**self._misses - 1

    def _find(self, token_ids: Sequence[int]) -> int:
        """Return the place of the token that ends the best match of the last tokens, -1 if there is none."""
        last = len(token_ids) - 1
        self._index(token_ids, last)
        if last < MIN_MATCH:
            return -1
        place = self._latest.get(_pair(token_ids[last - 1], token_ids[last]), -1)
        if place == last:  # looked at before
            place = self._before[last]
        best, longest = -1, MIN_MATCH + self._misses // 2 - 1
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            length = MIN_MATCH
            while length < MAX_MATCH and length <= place and token_ids[place - length] == token_ids[last - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        return best

    def _index(self, token_ids: Sequence[int], last: int) -> None:
        """Enter the places up to ``last``."""
        before, latest = self._before, self._latest
        for place in range(len(before), last + 1):
            pair = _pair(token_ids[place - 1], token_ids[place])
            before.append(latest.get(pair, -1))
            latest[pair] = place


def _pair(first: int, second: int) -> int:
    return first << 32 | second
