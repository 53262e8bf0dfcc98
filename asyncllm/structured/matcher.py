"""Where one output stands in its grammar: which tokens may come next, and whether any may.

Belongs to the busy loop's thread. Invariant: :attr:`Matcher.mask` is that of the tokens followed so far, and is ready
before it is needed; a sample that was dropped was never followed, so there is nothing to take back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import RequestFailedError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

__all__ = ["Matcher"]


class Matcher:
    """Follows one output; ``compiled`` is its own copy of a compiled grammar.

    ``ignore_eos`` excludes ``eos_token_ids`` as long as something else may come.

    :raises RequestFailedError: the grammar is too complex for its first mask.
    """

    __slots__ = ("_end", "_library", "_without_end", "mask")

    def __init__(
        self, compiled: LLMatcher, *, vocab_size: int, eos_token_ids: Sequence[int], ignore_eos: bool = False
    ) -> None:
        self._library = compiled
        end = sum(1 << token_id for token_id in set(eos_token_ids))
        self._end = end.to_bytes(-(-vocab_size // 8), "little")
        self._without_end = ~end if ignore_eos else 0
        self.mask = self._compute()
        """Bit i (of byte i // 8) is set where token i may come next."""

    @property
    def may_end(self) -> bool:
        """Return whether what was followed is a whole output."""
        return self._library.is_accepting()

    def follow(self, token_id: int) -> bool:
        """Take the next token, which is no end of sequence; return whether nothing may come after it.

        Takes 10 µs for a vocabulary of 49,152 (median, :mod:`benchmarks.structured_output`).

        :raises RequestFailedError: the grammar does not allow the token, or is too complex to go on with.
        """
        if not self._library.consume_token(token_id):
            raise self._failure(f"token {token_id} does not fit its grammar")
        if self._library.is_stopped():
            self._raise_if_broken()
            return True
        self.mask = self._compute()
        return self.mask == self._end

    def _compute(self) -> bytes:
        mask = self._library.compute_bitmask()[: len(self._end)]
        self._raise_if_broken()
        if self._without_end:
            open_ends = int.from_bytes(mask, "little") & self._without_end
            if open_ends:
                return open_ends.to_bytes(len(mask), "little")
        return mask

    def _raise_if_broken(self) -> None:
        if self._library.is_error():
            raise self._failure("its grammar cannot be followed")

    def _failure(self, what: str) -> RequestFailedError:
        return RequestFailedError(f"the engine failed on this request: {what}: {shown(self._library.get_error())}")
