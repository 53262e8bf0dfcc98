"""Where one output stands in its grammar: which tokens may come next, and whether any may.

Belongs to the busy loop's thread. Invariant: :attr:`Matcher.mask` is that of the tokens followed so far, and is ready
before it is needed; a sample that was dropped was never followed, so there is nothing to take back.

As long as there is room, a token is allowed if the grammar does. Towards ``max_tokens`` a way to the end is looked for
(:mod:`asyncllm.structured.ending`): each time that half of the room beside it is used up, in the end after each token.
Where hardly more is left than the way and what one token can add to it, only the way's next token is allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import RequestFailedError, shown
from asyncllm.structured.ending import find_ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

__all__ = ["Matcher"]

WATCHED = 256
"""With so many tokens left the way to the end is looked for first."""
NEAR = 48
"""With so much room beside it, it is looked for after each token."""
SPARE = 8
"""Tokens beside the way and the most that a token was seen to add to it, with which it has to be taken."""


class Matcher:
    """Follows one output; ``compiled`` is its own copy of a compiled grammar.

    ``max_tokens`` may be drawn. ``ignore_eos`` excludes ``eos_token_ids`` as long as something else may come.
    ``closing`` are orders of tokens by which an end is looked for; without any, an output may be cut off.

    :raises RequestFailedError: the grammar is too complex for its first mask.
    """

    __slots__ = (
        "_check_at",
        "_closing",
        "_end",
        "_ending",
        "_largest_detour",
        "_library",
        "_way",
        "_without_end",
        "mask",
    )

    def __init__(
        self,
        compiled: LLMatcher,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_tokens: int,
        ignore_eos: bool = False,
        closing: Sequence[Sequence[int]] = (),
    ) -> None:
        self._library = compiled
        end = sum(1 << token_id for token_id in set(eos_token_ids))
        self._end = end.to_bytes(-(-vocab_size // 8), "little")
        self._without_end = ~end if ignore_eos else 0
        self._closing = closing
        self._check_at = WATCHED if closing else -1
        self._way: int | None = None  # its length when it was looked for last
        self._largest_detour = 0
        self._ending: list[int] | None = None  # what has to come, in reverse
        self.mask = self._compute(max_tokens)
        """Bit i (of byte i // 8) is set where token i may come next."""
        self._ending = self._ending or None  # an output that may be empty need not be

    @property
    def is_shortened(self) -> bool:
        """Return whether the output was brought to its end for want of tokens."""
        return self._ending is not None

    @property
    def may_end(self) -> bool:
        """Return whether what was followed is a whole output."""
        return self._library.is_accepting()

    def follow(self, token_id: int, num_left: int) -> bool:
        """Take the next token, which is no end of sequence; return whether nothing may come after it.

        ``num_left`` tokens may still be drawn. Takes 15 µs for a vocabulary of 49,152 (median).

        :raises RequestFailedError: the grammar does not allow the token, or is too complex to go on with.
        """
        if not self._library.consume_token(token_id):
            raise self._failure(f"token {token_id} does not fit its grammar")
        if self._library.is_stopped():
            self._raise_if_broken()
            return True
        if self._ending is not None:
            self._ending.pop()
            if not self._ending:
                return True
            self.mask = self._only(self._ending[-1])
            return False
        self.mask = self._compute(num_left)
        return self._must_end()

    def _must_end(self) -> bool:
        return self.mask == self._end or (self._ending is not None and not self._ending)

    def _compute(self, num_left: int) -> bytes:
        mask = self._library.compute_bitmask()[: len(self._end)]
        self._raise_if_broken()
        if num_left <= self._check_at:
            self._watch_the_end(num_left)
            if self._ending:
                return self._only(self._ending[-1])
        if self._without_end:
            open_ends = int.from_bytes(mask, "little") & self._without_end
            if open_ends:
                return open_ends.to_bytes(len(mask), "little")
        return mask

    def _watch_the_end(self, num_left: int) -> None:
        """Look for a way to the end, and take it if there is hardly room for more."""
        ending = find_ending(self._library, self._closing, num_left)
        if ending is None:  # none fits, or only by a detour
            self._check_at = num_left // 2
            return
        way, room = len(ending), num_left - len(ending)
        if self._way is not None:
            self._largest_detour = max(self._largest_detour, way - self._way)
        self._way = way
        if room <= SPARE + self._largest_detour:
            self._ending = ending[::-1]
        self._check_at = num_left - (1 if room <= NEAR else room // 2)

    def _only(self, token_id: int) -> bytes:
        return (1 << token_id).to_bytes(len(self._end), "little")

    def _raise_if_broken(self) -> None:
        if self._library.is_error():
            raise self._failure("its grammar cannot be followed")

    def _failure(self, what: str) -> RequestFailedError:
        return RequestFailedError(f"the engine failed on this request: {what}: {shown(self._library.get_error())}")
