"""The free list's order, use counts and the prefix cache's map; case ids are those of the case lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncllm.core.block_hash import BlockKey, make_block_key
from asyncllm.core.block_pool import BlockPool


def key(*token_ids: int, parent: bytes = b"root") -> BlockKey:
    return make_block_key(parent, token_ids)


def test_b89_blocks_are_taken_in_order_and_the_null_block_never():
    pool = BlockPool(5)
    assert list(pool.free_blocks()) == [1, 2, 3, 4, 5]
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [3, 4, 5]
    assert list(pool.free_blocks()) == []
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_b89_more_than_there_is_raises_and_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert list(pool.free_blocks()) == [2, 3]


def test_b89_a_block_leaves_the_middle_of_the_list():
    pool = BlockPool(4)
    block_ids = pool.allocate(4)
    for block_id in block_ids:
        pool.cache(block_id, key(block_id), ())
    pool.free(block_ids)
    assert list(pool.free_blocks()) == [4, 3, 2, 1]
    pool.touch([3, 2])
    assert list(pool.free_blocks()) == [4, 1]
    pool.check_integrity()
    pool.touch([1, 4])
    assert list(pool.free_blocks()) == []
    pool.free([2])
    assert list(pool.free_blocks()) == [2]
    pool.check_integrity()


def test_b76_what_is_not_cached_goes_first_and_a_cached_tail_before_its_head():
    pool = BlockPool(10)
    a = pool.allocate(4)
    for block_id in a[:3]:
        pool.cache(block_id, key(block_id), ())
    pool.touch(a[:3])
    b = [*a[:3], *pool.allocate(1)]
    assert [pool.ref_count(block_id) for block_id in b] == [2, 2, 2, 1]
    pool.free(a)
    assert list(pool.free_blocks()) == [4, 6, 7, 8, 9, 10]
    pool.free(b)
    assert list(pool.free_blocks()) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    pool.check_integrity()


def test_b78_b80_taking_a_block_evicts_what_it_held():
    pool = BlockPool(3)
    block_ids = pool.allocate(3)
    for block_id in block_ids:
        pool.cache(block_id, key(block_id), ())
    pool.free(block_ids)
    assert pool.allocate(2) == [3, 2]
    assert [pool.lookup(key(block_id), ()) is not None for block_id in (1, 2, 3)] == [True, False, False]
    pool.allocate(1)
    assert pool.num_cached_blocks == 0
    pool.check_integrity()


def test_b86_reset_forgets_content_and_leaves_blocks_to_their_users():
    pool = BlockPool(3)
    block_ids = pool.allocate(1)
    pool.cache(1, key(1), ())
    pool.reset()
    assert pool.lookup(key(1), ()) is None
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 2)
    pool.free(block_ids)
    pool.check_integrity()


def test_equal_content_is_kept_once_and_keeps_its_name():
    pool = BlockPool(3)
    pool.allocate(2)
    first = pool.cache(1, key(7), ())
    assert pool.cache(2, key(7), ()) == first
    assert pool.lookup(key(7), ()) == (1, first)


def test_r69_a_clash_is_a_miss():
    pool = BlockPool(3)
    pool.allocate(3)
    content_id = pool.cache(1, BlockKey(b"x", b"tokens"), ())
    assert pool.lookup(BlockKey(b"x", b"others"), ()) is None
    assert pool.lookup(BlockKey(b"x", b"tokens"), (("salt", "s"),)) is None
    assert pool.lookup(BlockKey(b"x", b"tokens"), 77) is None
    assert pool.cache(2, BlockKey(b"x", b"others"), ()) is None
    assert pool.lookup(BlockKey(b"x", b"tokens"), ()) == (1, content_id)


def test_r69_a_child_is_not_taken_for_that_of_a_new_owner_of_the_parents_hash():
    pool = BlockPool(4)
    pool.allocate(2)
    parent = pool.cache(1, BlockKey(b"p", b"first"), ())
    assert parent is not None
    pool.cache(2, BlockKey(b"c", b"child"), parent)
    pool.evict(1)
    clash = pool.cache(1, BlockKey(b"p", b"other"), ())
    assert clash is not None
    assert pool.lookup(BlockKey(b"c", b"child"), clash) is None


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool next to a slow model: a list of free blocks, a dict of counts, a dict of contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.free = list(range(1, 9))
        self.counts: dict[int, int] = {}
        self.contents: dict[int, int] = {}  # block → token; one-block sequences are enough here
        self.owned: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 9))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.free):
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(num_blocks)
            return
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block_id in expected:
            self.contents.pop(block_id, None)
            self.counts[block_id] = 1
        assert self.pool.allocate(num_blocks) == expected
        self.owned.append(expected)

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), token=st.integers(0, 5))
    def cache(self, data: Any, token: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.counts)))
        if block_id in self.contents:
            return
        self.pool.cache(block_id, key(token), ())
        if token not in self.contents.values():
            self.contents[block_id] = token

    @rule(token=st.integers(0, 5))
    def hit(self, token: int) -> None:
        found = self.pool.lookup(key(token), ())
        expected = {content: block_id for block_id, content in self.contents.items()}.get(token)
        assert (found and found[0]) == expected
        if expected is not None:
            assert self.pool.num_free_of([expected]) == (expected in self.free)
            self.pool.touch([expected])
            if expected in self.free:
                self.free.remove(expected)
            self.counts[expected] = self.counts.get(expected, 0) + 1
            self.owned.append([expected])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        block_ids = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free(block_ids)
        for block_id in reversed(block_ids):
            self.counts[block_id] -= 1
            if not self.counts[block_id]:
                del self.counts[block_id]
                self.free.insert(len(self.free) if block_id in self.contents else 0, block_id)

    @rule(block_id=st.integers(1, 8))
    def evict(self, block_id: int) -> None:
        self.pool.evict(block_id)
        self.contents.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.contents.clear()

    @invariant()
    def agree(self) -> None:
        self.pool.check_integrity()
        assert list(self.pool.free_blocks()) == self.free
        assert {i: self.pool.ref_count(i) for i in range(1, 9) if self.pool.ref_count(i)} == self.counts
        assert self.pool.num_cached_blocks == len(self.contents)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
