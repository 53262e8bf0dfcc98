"""The KV blocks: which are free, how many requests use each, and what the unchanged ones still hold.

A block is its id, 1 … num_blocks; its state lives in columns, so that a million blocks cost 12 MB and the garbage
collector nothing. Block 0 is the null block: never handed out, it serves as the head of the ring of free blocks.

    take from here                                                     evicted last
    0 ⇄ freed, nothing cached ⇄ never used ⇄ cached, oldest … ⇄ cached, newest ⇄ 0

A block in the prefix cache stays findable while it is free; taking it from the ring evicts its content. What is not
cached returns to the front, what is cached to the back, the tail of a sequence first: prefixes live longest.

Invariants: a block is in the ring exactly if no request uses it; ``_hash_to_block`` and ``_cached`` mirror each other.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from asyncllm.core.block_hash import BlockKey, ExtraKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["BlockPool", "CachedBlock"]


class CachedBlock(msgspec.Struct, frozen=True, gc=False):
    """What a cached block holds: its key, what it follows, and the number by which its children name it.

    ``parent`` is the ``content_id`` of the block before, or the extra keys for a first block. Every entry to the cache
    gets a new ``content_id``, so equal parents mean equal prefixes whatever the hashes do.
    """

    key: BlockKey
    parent: ExtraKeys | int
    content_id: int


class BlockPool:
    """A fixed set of blocks with use counts, an O(1) free list in order of eviction, and the prefix cache's map."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        self._next = array(
            "i", [*range(1, num_blocks + 1), 0]
        )  # [N + 1] the ring; only links of free blocks mean something
        self._previous = array("i", [num_blocks, *range(num_blocks)])  # [N + 1]
        self._ref_counts = array("i", bytes(4 * (num_blocks + 1)))  # [N + 1]
        self._cached: dict[int, CachedBlock] = {}  # by block id
        self._hash_to_block: dict[bytes, int] = {}
        self._last_content_id = 0

    @property
    def num_cached_blocks(self) -> int:
        """Return the number of blocks, free or in use, that a lookup can find."""
        return len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """Return the number of requests that use a block."""
        return self._ref_counts[block_id]

    def free_blocks(self) -> Iterator[int]:
        """Yield the ids of the free blocks in the order in which they will be taken."""
        block_id = self._next[0]
        while block_id:
            yield block_id
            block_id = self._next[block_id]

    # ------------------------------------------------------------------------------------------- taking and giving back
    def allocate(self, num_blocks: int) -> list[int]:
        """Return ``num_blocks`` blocks, each used once, whose former content is forgotten.

        :raises ValueError: fewer are free.
        """
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_free_blocks} free")
        block_ids: list[int] = []
        block_id = self._next[0]
        for _ in range(num_blocks):
            block_ids.append(block_id)
            self._ref_counts[block_id] = 1
            self.evict(block_id)
            block_id = self._next[block_id]
        self._next[0] = block_id
        self._previous[block_id] = 0
        self.num_free_blocks -= num_blocks
        return block_ids

    def num_free_of(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are free: what :meth:`touch` will take from the free list."""
        ref_counts = self._ref_counts
        return sum(not ref_counts[block_id] for block_id in block_ids)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Use these cached blocks once more; free ones leave the free list and keep their content."""
        for block_id in block_ids:
            if not self._ref_counts[block_id]:
                before, after = self._previous[block_id], self._next[block_id]
                self._next[before] = after
                self._previous[after] = before
                self.num_free_blocks -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Use the blocks of one sequence (first to last) once less; unused ones become free."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                before, after = (self._previous[0], 0) if block_id in self._cached else (0, self._next[0])
                self._next[before] = self._previous[after] = block_id
                self._previous[block_id] = before
                self._next[block_id] = after
                self.num_free_blocks += 1

    # ------------------------------------------------------------------------------------------------- the prefix cache
    def lookup(self, key: BlockKey, parent: ExtraKeys | int) -> tuple[int, int] | None:
        """Return (block id, content id) of the cached block with these tokens after this parent."""
        block_id = self._hash_to_block.get(key.hash)
        if block_id is None:
            return None
        cached = self._cached[block_id]
        if cached.key.token_ids != key.token_ids or cached.parent != parent:
            return None  # two contents, one hash
        return block_id, cached.content_id

    def cache(self, block_id: int, key: BlockKey, parent: ExtraKeys | int) -> int | None:
        """Make a full block findable and return its content id.

        If another block holds the same already, that one stays and its content id is returned. ``None``: another
        content has this hash, so neither this block nor what follows it can be cached.
        """
        if key.hash in self._hash_to_block:
            found = self.lookup(key, parent)
            return found and found[1]
        self._last_content_id += 1
        self._cached[block_id] = CachedBlock(key, parent, self._last_content_id)
        self._hash_to_block[key.hash] = block_id
        return self._last_content_id

    def evict(self, block_id: int) -> None:
        """Forget what a block holds; its users keep it."""
        cached = self._cached.pop(block_id, None)
        if cached is not None:
            del self._hash_to_block[cached.key.hash]

    def reset(self) -> None:
        """Forget what every block holds; its users keep it."""
        self._cached.clear()
        self._hash_to_block.clear()

    # -------------------------------------------------------------------------------------------------------- for tests
    def check_integrity(self) -> None:
        """Verify every invariant of the pool in O(num_blocks).

        :raises AssertionError: one does not hold.
        """
        free = list(self.free_blocks())
        assert len(free) == len(set(free)) == self.num_free_blocks, "the ring and its count differ"
        assert all(self._previous[after] == before for before, after in zip([0, *free], [*free, 0], strict=True))
        assert self._ref_counts[0] == 0, "the null block is in use"
        assert min(self._ref_counts) >= 0, "a block was given back too often"
        unused = {block_id for block_id in range(1, self.num_blocks + 1) if not self._ref_counts[block_id]}
        assert unused == set(free), "free and unused blocks differ"
        assert {cached.key.hash: block_id for block_id, cached in self._cached.items()} == self._hash_to_block
