"""Which blocks a request holds: the longest cached prefix, new blocks for the rest, full blocks entered in the cache.

The scheduler asks here in requests and tokens; :mod:`asyncllm.core.block_pool` knows only blocks.

    block_ids   | found in the cache | taken new ............................... |
                | num_cached_blocks: told to the cache ... |  full or filling    |

A block is entered in the cache when the step that fills it is *scheduled* and its token ids are known here, or a little
later: a request admitted in the same step finds it already. That is sound because steps run in order, and within one
each layer writes the keys and values of all rows before any row reads them (:mod:`asyncllm.attention.base`).

What a request gives back while steps are out is *leaving*: nobody gets it before the newest of those steps has ended.

Invariant: tokens that the cache or a second request knows are never written again. A hit of the cache therefore covers
whole blocks and leaves at least one token to compute; what else a branch or a pinned prefix finds in a block that is
filled in part (:mod:`asyncllm.core.block_holds`) is copied before the step writes.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.core.block_hash import BlockKey, ExtraKeys, HashFunction, hash_block, make_block_key, root_hash
from asyncllm.core.block_holds import BlockHolds
from asyncllm.core.block_pool import BlockPool
from asyncllm.core.request import NEVER, Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncllm.config import CacheConfig

__all__ = ["KVCacheManager"]


class Leaving(NamedTuple):
    """Blocks that a request gave back, until a step has ended; and since which step it had held them."""

    until_step: int
    request: Request
    since_step: int
    block_ids: list[int]
    num_found_blocks: int


class _Prefix(NamedTuple):
    """What a request need not compute: ``num_tokens``, in whole blocks and at the begin of ``source`` (0: none)."""

    block_ids: list[int]
    parent: ExtraKeys | int | None
    num_tokens: int
    source: int = 0


class KVCacheManager:
    """Gives blocks to requests and takes them back."""

    def __init__(self, config: CacheConfig, num_blocks: int, hash_function: HashFunction = hash_block) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = config.tokens_per_block
        self.enable_prefix_caching = config.enable_prefix_caching
        self._hash_function = hash_function
        self._leaving: deque[Leaving] = deque()
        self.holds = BlockHolds(self.pool, self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def reads_cache(self, request: Request) -> bool:
        """Return whether a request looks in the cache; one that wants logprobs of its prompt has to compute it all."""
        return self.enable_prefix_caching and request.sampling.prompt_logprobs < 0

    def branch(self, request: Request, parent: Request) -> None:
        """Keep for ``request``, which waits, what ``parent`` has of its tokens."""
        if request.sampling.prompt_logprobs < 0:
            self.cache_full_blocks(parent)  # for the chain: the request finds there what it holds
            self.holds.branch(request, parent)

    # ---------------------------------------------------------------------------------------------- blocks of a request
    def allocate(self, request: Request, headroom: int = 0) -> bool:
        """Give a request blocks for all its tokens, a known prefix first, if ``headroom`` more stay free after it.

        Its tokens are those whose ids are known here. Sets ``num_computed_tokens`` to what the prefix holds; where that
        ends within a block, ``copied_from`` is to be copied to the block that follows ``num_found_blocks`` before the
        step. ``False``, and nothing done, if too few blocks are free.
        """
        pool = self.pool
        cached, parent, num_tokens, source = self._find_prefix(request)
        num_new = self.num_blocks_for(len(request.token_ids)) - len(cached)
        if num_new + pool.num_free_of(cached) + headroom > pool.num_free_blocks:
            return False
        pool.touch(cached)  # first: what is taken new must not evict them
        request.block_ids = cached + pool.allocate(num_new)
        request.num_computed_tokens = num_tokens
        request.copied_from = source
        request.num_found_blocks = request.num_cached_blocks = len(cached)
        request.cache_parent = parent
        self.holds.drop_branch(request)
        return True

    def will_fit(self, request: Request, headroom: int) -> bool:
        """Return whether :meth:`allocate` is going to succeed by itself: with the blocks that are leaving."""
        cached = self._find_prefix(request).block_ids
        num_wanted = self.num_blocks_for(len(request.token_ids)) - len(cached) + self.pool.num_free_of(cached)
        return num_wanted + headroom <= self.pool.num_free_blocks + self.num_leaving_blocks(cached)

    def append_block(self, request: Request) -> list[int]:
        """Give a request whose blocks are full one block more, and return it as a list.

        :raises ValueError: none is free.
        """
        self.cache_full_blocks(request)
        new = self.pool.allocate(1)
        request.block_ids += new
        return new

    def cache_full_blocks(self, request: Request) -> None:
        """Enter in the prefix cache the known tokens that the request has computed (or is, in a scheduled step)."""
        num_known, num_computed = len(request.token_ids), request.num_computed_tokens
        num_full = (num_known if num_known < num_computed else num_computed) // self.block_size
        if not self.enable_prefix_caching or num_full <= request.num_cached_blocks:
            return
        for index in range(request.num_cached_blocks, num_full):
            if request.cache_parent is None:  # a clash cut the chain: what follows could not be found
                break
            key = self._block_key(request, index)
            request.cache_parent = self.pool.cache(request.block_ids[index], key, request.cache_parent)
        request.num_cached_blocks = num_full

    def free(self, request: Request, after_step: int | None = None) -> None:
        """Take back all blocks of a request; what it computed stays findable until its blocks are needed.

        ``after_step``: the newest step that is out; nobody gets the blocks before :meth:`step_ended` was told of it.
        """
        self.cache_full_blocks(request)
        if request.prefix_id:
            self.holds.fill_pin(request)
        if after_step is None:
            self.pool.free(request.block_ids)
        else:
            found = request.num_found_blocks
            self._leaving.append(Leaving(after_step, request, request.since_step, request.block_ids, found))
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_cached_blocks = 0

    def step_ended(self, step_id: int) -> None:
        """Let others have what was leaving until this step; steps end in order."""
        while self._leaving and self._leaving[0].until_step <= step_id:
            self.pool.free(self._leaving.popleft().block_ids)

    def num_leaving_blocks(self, wanted: Sequence[int] = ()) -> int:
        """Return how many blocks, ``wanted`` ones aside, will be free once the steps that are out have ended."""
        if not self._leaving:
            return 0
        num_uses = Counter(block_id for left in self._leaving for block_id in left.block_ids)
        for block_id in wanted:
            num_uses.pop(block_id, None)
        return sum(self.pool.ref_count(block_id) == count for block_id, count in num_uses.items())

    def invalidate(self, request: Request, step_id: int = NEVER) -> set[int]:
        """Let nobody find what a request wrote in the life to which ``step_id`` belongs; return all those blocks.

        A life goes from admission to preemption or end, its blocks may be leaving. What the request had found in the
        cache was written by others.
        """
        block_ids: set[int] = set()
        if request.since_step <= step_id:
            block_ids.update(request.block_ids[request.num_found_blocks :])
            request.num_computed_tokens = 0
        for left in self._leaving:
            if left.request is request and left.since_step <= step_id:
                block_ids.update(left.block_ids[left.num_found_blocks :])
        for block_id in block_ids:
            self.pool.evict(block_id)
        return block_ids

    def readers_of(self, block_ids: set[int], requests: Iterable[Request]) -> list[Request]:
        """Return those of ``requests`` that hold such a block, and those that gave one back and did not start anew."""
        found = {
            request: None
            for request in requests
            if not block_ids.isdisjoint(request.block_ids) or request.copied_from in block_ids
        }
        for left in self._leaving:
            if left.since_step == left.request.since_step and not block_ids.isdisjoint(left.block_ids):
                found[left.request] = None
        return list(found)

    def _find_prefix(self, request: Request) -> _Prefix:
        """Return the longest prefix that is there: in the cache, or held for this request."""
        cached, parent = self._find_cached_prefix(request)
        num_tokens = len(cached) * self.block_size
        hold = self.holds.find(request)
        if hold is None or request.sampling.prompt_logprobs >= 0:
            return _Prefix(cached, parent, num_tokens)
        num_held = hold.num_common(request)
        if num_held <= num_tokens:
            return _Prefix(cached, parent, num_tokens)
        num_full, num_rest = divmod(num_held, self.block_size)
        source = hold.block_ids[num_full] if num_rest else 0
        if num_full > len(cached):  # the cache has lost, or never had, a link of the chain
            return _Prefix(hold.block_ids[:num_full], None, num_held, source)
        return _Prefix(cached, parent, num_held, source)

    def _find_cached_prefix(self, request: Request) -> tuple[list[int], ExtraKeys | int]:
        """Return the blocks of the longest cached prefix, and the parent of what follows them."""
        block_ids: list[int] = []
        parent: ExtraKeys | int = request.extra_keys
        if self.reads_cache(request):
            num_known = len(request.token_ids)
            for index in range((num_known - 1) // self.block_size):  # -1: the last token is always computed
                found = self.pool.lookup(self._block_key(request, index), parent)
                if found is None:
                    break
                block_id, parent = found
                block_ids.append(block_id)
        return block_ids, parent

    def _block_key(self, request: Request, index: int) -> BlockKey:
        """Return the key of a full block; those before it are known."""
        keys = request.block_keys
        if index == len(keys):
            start = index * self.block_size
            parent = keys[-1].hash if keys else root_hash(request.extra_keys, self._hash_function)
            token_ids = request.token_ids[start : start + self.block_size]
            keys.append(make_block_key(parent, token_ids, self._hash_function))
        return keys[index]

    # -------------------------------------------------------------------------------------------------- the whole cache
    def reset_prefix_cache(self) -> None:
        """Forget all cached content, that of leaving blocks too; no request may hold blocks."""
        self.pool.reset()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Verify that ``requests``, all that there are, hold exactly the blocks in use that are not leaving.

        :raises AssertionError: they do not.
        """
        self.pool.check_integrity()
        held = Counter[int]()
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), f"{request} holds a block twice"
            assert request.num_computed_tokens <= len(request.block_ids) * self.block_size, f"{request} lacks blocks"
            held.update(request.block_ids)
        for left in self._leaving:
            held.update(left.block_ids)
        held.update(self.holds.block_ids())
        for block_id in range(self.pool.num_blocks + 1):
            assert self.pool.ref_count(block_id) == held[block_id], f"use count of block {block_id} is wrong"
