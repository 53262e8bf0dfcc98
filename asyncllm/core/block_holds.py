"""Blocks that are kept for somebody who does not run: branches that wait, and pinned prefixes.

A *hold* uses the blocks of the first tokens of a sequence, the last of which may be filled in part. A branch of a
living request gets one as it arrives, so the request may end or go on before the branch is admitted; from then on the
full blocks are shared, and what the last one holds is copied into a block of the branch's own. A *pin* is a hold by
name, which stays until it is taken off: it takes over the blocks of the first request that computed the prefix.

Both give way before the engine stands still: holds of branches before a running request is preempted, pins when
nothing runs and the first in the queue does not fit otherwise. A branch then reuses what the prefix cache has; a pin
keeps its name, and the next request that computes its prefix fills it again.

Invariant: the tokens of a hold are in its blocks, or will be once the steps that are out have run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncllm.core.block_hash import ExtraKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncllm.core.block_pool import BlockPool
    from asyncllm.core.request import Request

__all__ = ["BlockHolds", "Hold"]


class Hold(msgspec.Struct):
    """The first ``num_tokens`` of ``token_ids`` are in ``block_ids``, which it uses."""

    token_ids: list[int]
    extra_keys: ExtraKeys
    num_tokens: int = 0
    block_ids: list[int] = []

    def num_common(self, request: Request) -> int:
        """Return how many of its tokens ``request`` begins with; the last token of a request is always computed."""
        if request.extra_keys != self.extra_keys:
            return 0
        return num_common(self.token_ids[: self.num_tokens], request.token_ids[:-1])


class BlockHolds:
    """The holds of waiting branches, by request, and the pins, by id."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._branches: dict[Request, Hold] = {}
        self._pins: dict[int, Hold] = {}

    # --------------------------------------------------------------------------------------------------------- branches
    def branch(self, request: Request, parent: Request) -> None:
        """Hold for ``request``, which waits, what ``parent`` has computed of its tokens, or holds itself."""
        held = self._branches.get(parent)
        num_tokens, block_ids = (
            (parent.num_computed_tokens, parent.block_ids) if held is None else (held.num_tokens, held.block_ids)
        )
        source = Hold(parent.token_ids, parent.extra_keys, min(num_tokens, len(parent.token_ids)), block_ids)
        num_shared = source.num_common(request)
        if num_shared:
            self._branches[request] = hold = Hold(request.token_ids, request.extra_keys)
            self._fill(hold, num_shared, block_ids)

    def find(self, request: Request) -> Hold | None:
        """Return the hold whose tokens ``request`` may take: its own, or that of the prefix that it names."""
        hold = self._branches.get(request)
        return self._pins.get(request.prefix_id) if hold is None and request.prefix_id else hold

    def drop_branch(self, request: Request) -> None:
        """Let go of what is held for ``request``, if anything is."""
        hold = self._branches.pop(request, None)
        if hold is not None:
            self._empty(hold)

    def drop_branches(self) -> bool:
        """Let go of what is held for all waiting branches; return whether anything was."""
        had_some = bool(self._branches)
        for request in list(self._branches):
            self.drop_branch(request)
        return had_some

    # ------------------------------------------------------------------------------------------------------------- pins
    def pin(self, pin_id: int, token_ids: Sequence[int], extra_keys: ExtraKeys) -> None:
        """Make a pin, which is empty until :meth:`fill_pin`."""
        self.unpin(pin_id)
        self._pins[pin_id] = Hold(list(token_ids), extra_keys)

    def unpin(self, pin_id: int) -> None:
        """Take a pin off; an unknown one is ignored."""
        hold = self._pins.pop(pin_id, None)
        if hold is not None:
            self._empty(hold)

    def fill_pin(self, request: Request) -> None:
        """Have the pin that ``request`` names take over the blocks of its prefix; call before the request lets go."""
        hold = self._pins.get(request.prefix_id)
        if hold is None or hold.extra_keys != request.extra_keys or hold.num_tokens == len(hold.token_ids):
            return
        num_tokens = num_common(hold.token_ids, request.token_ids[: request.num_computed_tokens])
        if num_tokens > hold.num_tokens:
            block_ids = request.block_ids
            before = hold.block_ids
            self._fill(hold, num_tokens, block_ids)
            self._pool.free(before)

    def empty_pins(self) -> bool:
        """Let go of the blocks of all pins, which keep their names; return whether they had any."""
        full = [hold for hold in self._pins.values() if hold.block_ids]
        for hold in full:
            self._empty(hold)
        return bool(full)

    # -------------------------------------------------------------------------------------------------------- all of it
    def drop_those_with(self, block_ids: set[int]) -> None:
        """Let go of every hold with one of these blocks, whose content is wrong."""
        for request, hold in list(self._branches.items()):
            if not block_ids.isdisjoint(hold.block_ids):
                self.drop_branch(request)
        for hold in self._pins.values():
            if not block_ids.isdisjoint(hold.block_ids):
                self._empty(hold)

    def block_ids(self) -> Iterator[int]:
        """Yield the blocks in use here, once for each use."""
        for hold in (*self._branches.values(), *self._pins.values()):
            yield from hold.block_ids

    @property
    def num_pinned_blocks(self) -> int:
        """Return the number of blocks that pins use."""
        return sum(len(hold.block_ids) for hold in self._pins.values()) if self._pins else 0

    def _fill(self, hold: Hold, num_tokens: int, block_ids: Sequence[int]) -> None:
        hold.num_tokens = num_tokens
        hold.block_ids = list(block_ids[: -(-num_tokens // self._block_size)])
        self._pool.touch(hold.block_ids)

    def _empty(self, hold: Hold) -> None:
        self._pool.free(hold.block_ids)
        hold.num_tokens, hold.block_ids = 0, []


def num_common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    if len(some) <= len(others) and some == others[: len(some)]:
        return len(some)
    return next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), min(len(some), len(others)))
