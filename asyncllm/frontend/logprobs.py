"""Columns of candidate tokens to :class:`asyncllm.outputs.TokenLogprobs`, with the text of each candidate.

A candidate's text is what it would add at its place: with the bytes of an unfinished character before it, without an
unfinished one at its end. So it never ends in U+FFFD, and is empty where a token is nothing but a part of a character.
Special tokens are shown as they are spelled, also where the output leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from asyncllm.outputs import Logprob, TokenLogprobs

if TYPE_CHECKING:
    from asyncllm.wire.messages import LogprobRows

__all__ = ["LogprobQueue", "PromptLogprobs", "position_logprobs"]

TextOf = Callable[[int], "str | None"]
"""Text of a candidate at the present place; ``None`` where text is not wanted."""


def position_logprobs(rows: LogprobRows, position: int, text_of: TextOf, num_requested: int = 0) -> TokenLogprobs:
    """Return the candidates at ``position`` (0 is the first of ``rows``), the last ``num_requested`` as requested."""
    start = position * rows.width
    found = [
        Logprob(token_id, logprob, rank, text_of(token_id))
        for token_id, logprob, rank in zip(
            rows.token_ids[start : start + rows.width],
            rows.logprobs[start : start + rows.width],
            rows.ranks[start : start + rows.width],
            strict=True,
        )
    ]
    end = len(found) - num_requested
    return TokenLogprobs(found[0], found[1:end], found[end:])


def num_positions(rows: LogprobRows) -> int:
    """Return how many positions ``rows`` holds."""
    return len(rows.token_ids) // rows.width


class LogprobQueue:
    """Rows of a sample's new tokens, handed out in the order in which the tokens come."""

    __slots__ = ("_num_requested", "_places")

    def __init__(self, num_requested: int = 0) -> None:
        """``num_requested`` is the number of the request's ``logprob_token_ids``."""
        self._num_requested = num_requested
        self._places: Iterator[tuple[LogprobRows, int]] = iter(())

    def add(self, rows: LogprobRows) -> None:
        """Take the rows of the message that is being processed; what was left of the one before is forgotten."""
        self._places = ((rows, position) for position in range(num_positions(rows)))

    def next(self, text_of: TextOf) -> TokenLogprobs | None:
        """Return the candidates of the next token, ``None`` where the engine sent none for it."""
        place = next(self._places, None)
        return None if place is None else position_logprobs(*place, text_of, self._num_requested)


class PromptLogprobs:
    """Candidates at each prompt position, as they arrive; ``None`` stands at the first, which nothing predicts."""

    def __init__(self, prompt_token_ids: list[int], peek: TextOf, push: Callable[[int], object]) -> None:
        """``peek`` and ``push`` are those of a decoder of the prompt's own, at its start."""
        self.values: list[TokenLogprobs | None] = [None]
        self._prompt_token_ids = prompt_token_ids
        self._peek = peek
        self._push = push
        if prompt_token_ids:
            push(prompt_token_ids[0])

    def add(self, rows: LogprobRows) -> None:
        """Append the next part."""
        for position in range(num_positions(rows)):
            index = len(self.values)
            self.values.append(position_logprobs(rows, position, self._peek))
            if index < len(self._prompt_token_ids):
                self._push(self._prompt_token_ids[index])
