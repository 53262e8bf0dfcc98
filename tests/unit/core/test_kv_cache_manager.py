"""Cached prefixes and blocks of requests; case ids are those of the case lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncllm.config import CacheConfig
from asyncllm.core.block_hash import hash_block, make_block_key, root_hash
from asyncllm.core.kv_cache_manager import KVCacheManager
from asyncllm.core.request import Request
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling
from tests.support.scheduling import Engine, solo_output

COMMON = list(range(100, 148))  # three blocks of 16


def request(token_ids: Sequence[int], *, salt: str | None = None, **sampling: Any) -> Request:
    message = EngineCoreRequest(0, list(token_ids), EngineSampling(10, **sampling), cache_salt=salt)
    return Request(message, priority=0, arrival=0, max_num_tokens=1000, eos_token_ids=frozenset())


def manager(num_blocks: int = 10, **options: Any) -> KVCacheManager:
    return KVCacheManager(CacheConfig(block_size=16), num_blocks, **options)


def admit(kv: KVCacheManager, one: Request) -> Request:
    """Give a request its blocks, and compute all its tokens."""
    assert kv.allocate(one)
    one.num_computed_tokens = one.num_tokens
    kv.cache_full_blocks(one)
    return one


def free_blocks(kv: KVCacheManager) -> list[int]:
    return list(kv.pool.free_blocks())


def test_b74_full_blocks_are_cached_by_a_chain():
    kv = manager()
    one = admit(kv, request(COMMON + [3] * 7))
    assert one.block_ids == [1, 2, 3, 4]
    assert kv.pool.num_cached_blocks == 3
    parent = root_hash(())
    for index, known in enumerate(one.block_keys):
        assert known == make_block_key(parent, COMMON[16 * index : 16 * (index + 1)])
        parent = hash_block(parent, known.token_ids)
    kv.check_integrity([one])


def test_b75_a_second_request_shares_the_prefix():
    kv = manager()
    a = admit(kv, request(COMMON + [3] * 7))
    b = request(COMMON + [4] * 5)
    assert kv.allocate(b)
    assert (b.block_ids, b.num_computed_tokens) == ([1, 2, 3, 5], 48)
    assert [kv.pool.ref_count(block_id) for block_id in b.block_ids] == [2, 2, 2, 1]
    kv.check_integrity([a, b])


def test_b76_the_order_in_which_freed_blocks_are_taken():
    kv = manager()
    a = admit(kv, request(COMMON + [3] * 7))
    b = admit(kv, request(COMMON + [4] * 7))
    kv.free(a)
    kv.free(b)
    assert free_blocks(kv) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_b77_a_hit_takes_freed_blocks_from_the_free_list():
    kv = manager()
    kv.free(admit(kv, request(COMMON + [3] * 7)))
    assert free_blocks(kv) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    c = request([*COMMON, 5])
    assert kv.allocate(c)
    assert c.block_ids == [1, 2, 3, 4]
    assert free_blocks(kv) == [5, 6, 7, 8, 9, 10]


def test_b78_b80_taking_everything_evicts_everything():
    kv = manager()
    kv.free(admit(kv, request(COMMON + [3] * 7)))
    big = request(range(1000, 1160))
    assert kv.allocate(big)
    assert sorted(big.block_ids) == list(range(1, 11))
    assert (free_blocks(kv), kv.pool.num_cached_blocks) == ([], 0)
    kv.check_integrity([big])


def test_b81_hit_blocks_are_not_evicted_by_the_same_request():
    kv = manager(4)
    kv.free(admit(kv, request(COMMON)))
    one = request(COMMON + [7] * 16)  # three hit, one new: exactly what is free
    assert kv.allocate(one)
    assert one.block_ids == [1, 2, 3, 4]
    assert one.num_computed_tokens == 48


def test_b82_without_caching_nothing_hits_and_a_shortage_is_refused():
    kv = KVCacheManager(CacheConfig(block_size=16, enable_prefix_caching=False), 4)
    a = admit(kv, request(COMMON))
    assert (kv.pool.num_cached_blocks, a.block_keys) == (0, [])
    b = request(COMMON)
    assert not kv.allocate(b)
    assert (b.block_ids, free_blocks(kv)) == ([], [4])
    kv.free(a)
    assert kv.allocate(b)
    assert b.num_computed_tokens == 0


def test_b84_prompt_logprobs_write_the_cache_but_do_not_read_it():
    kv = manager()
    a = admit(kv, request([*COMMON, 3], prompt_logprobs=0))
    b = request([*COMMON, 3], prompt_logprobs=0)
    assert kv.allocate(b)
    assert b.num_computed_tokens == 0
    assert not set(a.block_ids) & set(b.block_ids)
    c = request([*COMMON, 3])
    assert kv.allocate(c)
    assert c.num_computed_tokens == 48


@pytest.mark.parametrize("after_step", [None, 7], ids=["free", "leaving"])
def test_b86_reset_forgets_all_prefixes(after_step: int | None):
    kv = manager()
    a = admit(kv, request(COMMON))
    kv.free(a, after_step)
    kv.reset_prefix_cache()
    assert kv.pool.num_cached_blocks == 0
    again = request(COMMON)
    assert kv.allocate(again)
    assert again.num_computed_tokens == 0


def test_b90_salts_do_not_meet():
    kv = manager(20)
    admit(kv, request(COMMON, salt="a"))
    for salt, num_hit in (("b", 0), (None, 0), ("a", 32)):
        one = request(COMMON, salt=salt)
        assert kv.allocate(one)
        assert one.num_computed_tokens == num_hit


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(47, 32), (48, 32), (49, 48)])
def test_a_hit_leaves_a_token_to_compute_and_writes_no_shared_block(num_tokens: int, num_hit: int):
    kv = manager()
    tokens = [*COMMON, 3]
    admit(kv, request(tokens))
    one = request(tokens[:num_tokens])
    assert kv.allocate(one)
    assert one.num_computed_tokens == num_hit
    assert all(kv.pool.ref_count(block_id) == 1 for block_id in one.block_ids[num_hit // 16 :])


def test_blocks_leave_until_their_step_has_ended_and_can_be_found_meanwhile():
    kv = manager(6)
    a, b = admit(kv, request([*COMMON, 1])), admit(kv, request([9, 9]))
    kv.free(a, after_step=4)
    kv.free(b, after_step=5)
    assert (a.block_ids, kv.pool.num_free_blocks, kv.num_leaving_blocks()) == ([], 1, 5)
    kv.check_integrity([])
    c = request([*COMMON, 2])
    assert kv.allocate(c)
    assert (c.num_computed_tokens, kv.num_leaving_blocks()) == (48, 2)  # two of a's three and c's own are not free then
    kv.step_ended(4)
    assert (kv.pool.num_free_blocks, kv.num_leaving_blocks()) == (1, 1)
    kv.step_ended(5)
    assert (kv.pool.num_free_blocks, kv.num_leaving_blocks()) == (2, 0)
    kv.check_integrity([c])


def test_what_will_fit_counts_each_leaving_block_once():
    kv = manager(5)
    a = admit(kv, request([*COMMON, 1]))
    kv.free(a, after_step=0)
    one = request([*COMMON, *range(33)])  # three found, which are leaving, and three more
    assert not kv.allocate(one)
    assert not kv.will_fit(one, headroom=0)
    assert kv.will_fit(request([*COMMON, *range(32)]), headroom=0)
    assert not kv.will_fit(request([*COMMON, *range(32)]), headroom=1)


def test_a_block_is_entered_only_when_its_ids_are_known():
    kv = manager()
    one = request(COMMON[:31])
    assert kv.allocate(one)
    one.num_computed_tokens = 32  # the last one is on its way, and computed with
    kv.cache_full_blocks(one)
    assert kv.pool.num_cached_blocks == 1
    one.token_ids.append(7)
    kv.cache_full_blocks(one)
    assert kv.pool.num_cached_blocks == 2


def test_what_is_invalid_is_not_found_and_its_readers_are_known():
    kv = manager()
    a = admit(kv, request(COMMON))
    b, c = admit(kv, request([*COMMON, 1])), admit(kv, request([9] * 17))
    kv.free(a, after_step=0)
    assert kv.invalidate(a) == {1, 2, 3}
    assert kv.readers_of({1, 2, 3}, [b, c]) == [b, a]
    kv.free(b)
    again = request([*COMMON, 1])
    assert kv.allocate(again)
    assert again.num_computed_tokens == 0


def test_headroom_is_left_free():
    kv = manager(4)
    assert not kv.allocate(request(COMMON), headroom=2)
    assert kv.allocate(request(COMMON), headroom=1)


def test_blocks_are_hashed_once_and_only_as_they_fill():
    calls: list[bytes] = []

    def counting(parent: bytes, content: bytes) -> bytes:
        calls.append(content)
        return hash_block(parent, content)

    kv = manager(10, hash_function=counting)
    one = request(COMMON)
    for _ in range(3):
        assert kv.allocate(one)
        one.num_computed_tokens = 47
        kv.free(one)
    assert len(calls) == 1 + 2  # the root and two full blocks, over three admissions
    assert kv.allocate(one)
    one.num_computed_tokens = 48
    kv.append_block(one)
    assert len(calls) == 1 + 3


def modulo_three(parent: bytes, content: bytes) -> bytes:
    return bytes([hash_block(parent, content)[0] % 3])


def constant(parent: bytes, content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("hash_function", [modulo_three, constant])
def test_r69_hash_clashes_never_take_a_wrong_block(hash_function: Callable[[bytes, bytes], bytes]):
    engine = Engine(num_blocks=60, block_size=4, max_num_seqs=3, hash_function=hash_function)
    prompts = [[i % 3] * 4 + [i % 5] * 4 + [i] * (1 + i % 6) for i in range(20)]
    ids = [engine.add(prompt, max_tokens=9, salt=[None, "a", "b"][i % 3]) for i, prompt in enumerate(prompts)]
    engine.run()  # the fake worker verifies every KV it reads
    assert [engine.tokens[i] for i in ids] == [solo_output(prompt, 9) for prompt in prompts]
    engine.assert_empty()


@pytest.mark.parametrize("num_blocks", [24, 400])
def test_r70_tokens_do_not_depend_on_the_cache(num_blocks: int):
    prompts = [[5] * 12 + [i % 4] * 6 + [i] for i in range(30)]
    outputs = []
    for caching in (False, True):
        engine = Engine(num_blocks=num_blocks, block_size=4, max_num_seqs=4, enable_prefix_caching=caching)
        for _ in range(2):  # cold, then warm (or evicted)
            ids = [engine.add(prompt, max_tokens=6) for prompt in prompts]
            engine.run()
            outputs.append([engine.tokens[i] for i in ids])
        assert (engine.scheduler.stats().prefix_hits > 0) == caching
    assert outputs == [[solo_output(prompt, 6) for prompt in prompts]] * 4


def test_a_prefix_being_computed_in_the_same_step_is_found():
    engine = Engine(block_size=4)
    prompts = [[5] * 16 + [i] for i in range(8)]
    for prompt in prompts:
        engine.add(prompt, max_tokens=3)
    step = engine.step()
    assert step.num_scheduled_tokens == [17] + [1] * 7
    engine.run()
    assert list(engine.tokens.values()) == [solo_output(prompt, 3) for prompt in prompts]
