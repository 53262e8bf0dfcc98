"""Branches share the blocks of a living request, pins keep those of a prefix; the fake worker verifies what is read."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.wire.messages import PinPrefix
from tests.support.scheduling import Engine, solo_output

PIN = 1000
SIZES = [1, 15, 16, 17, 31, 32, 40]  # tokens of the prompt; a block has 16


def living(engine: Engine, num_prompt_tokens: int, num_output_tokens: int, **options: Any) -> tuple[int, list[int]]:
    """Return a request that has so many tokens of its output, and all of its tokens."""
    engine.num_requests = max(engine.num_requests, 1)  # 0 names no parent
    parent = engine.add(num_prompt_tokens, max_tokens=200, **options)
    prompt = [1000 + parent] * num_prompt_tokens
    while len(engine.tokens[parent]) < num_output_tokens:
        engine.step()
    return parent, prompt + engine.tokens[parent]


def pin(engine: Engine, pin_id: int, token_ids: list[int], salt: str | None = None) -> None:
    engine.scheduler.pin_prefix(PinPrefix(pin_id, token_ids, salt))


def num_prefilled(engine: Engine) -> int:
    return engine.scheduler.stats().num_prefill_tokens


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("num_prompt_tokens", SIZES)
def test_a_branch_computes_nothing_but_its_next_token(num_prompt_tokens: int, caching: bool) -> None:
    engine = Engine(enable_prefix_caching=caching)
    parent, tokens = living(engine, num_prompt_tokens, 5)
    before = num_prefilled(engine)
    branches = [engine.add(tokens, max_tokens=40, prefix_id=parent) for _ in range(3)]
    engine.run()
    assert num_prefilled(engine) - before == len(branches)  # each computes its newest token, which nobody has
    for branch in branches:
        assert engine.tokens[branch] == solo_output(tokens, 40)
        assert engine.finished[branch].num_cached_tokens == len(tokens) - 1
    assert engine.tokens[parent] == solo_output(tokens[:num_prompt_tokens], 200)
    engine.assert_empty()


def test_full_blocks_are_shared_and_the_last_one_is_copied() -> None:
    engine = Engine()
    parent, tokens = living(engine, 40, 3)
    free = engine.scheduler.kv.pool.num_free_blocks
    engine.add(tokens, prefix_id=parent)
    engine.step()
    assert engine.worker.num_copied_blocks == 1
    assert engine.scheduler.kv.pool.num_free_blocks == free - 1


def test_no_block_is_copied_where_the_branch_begins_one() -> None:
    engine = Engine()
    parent, tokens = living(engine, 30, 3)
    engine.add(tokens, prefix_id=parent)
    engine.run()
    assert engine.worker.num_copied_blocks == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_parent_goes_on_meanwhile(depth: int) -> None:
    engine = Engine()
    parent, tokens = living(engine, 20, 3)
    for _ in range(depth):
        engine.launch()
    branch = engine.add(tokens, max_tokens=30, prefix_id=parent)
    engine.run(depth=depth)
    assert engine.tokens[branch] == solo_output(tokens, 30)
    assert engine.finished[branch].num_cached_tokens == len(tokens) - 1


def test_the_parent_may_end_before_the_branch_is_admitted() -> None:
    engine = Engine()
    parent, tokens = living(engine, 20, 5)
    branches = [engine.add(tokens, max_tokens=9, prefix_id=parent) for _ in range(3)]
    engine.scheduler.abort_requests([parent])
    before = num_prefilled(engine)
    engine.run()
    assert [engine.tokens[branch] for branch in branches] == [solo_output(tokens, 9)] * 3
    assert num_prefilled(engine) - before == 3
    engine.assert_empty()


def test_a_branch_of_a_branch_that_waits_shares_as_well() -> None:
    engine = Engine(max_num_seqs=1)
    parent, tokens = living(engine, 20, 5)
    child = engine.add(tokens, max_tokens=9, prefix_id=parent)
    grandchild = engine.add(tokens, max_tokens=9, prefix_id=child)
    engine.scheduler.abort_requests([parent])
    engine.run()
    assert engine.tokens[child] == engine.tokens[grandchild] == solo_output(tokens, 9)
    assert engine.finished[grandchild].num_cached_tokens == len(tokens) - 1
    engine.assert_empty()


def test_a_branch_behind_the_parents_newest_token() -> None:
    engine = Engine()
    parent, tokens = living(engine, 20, 30)
    earlier = tokens[:27]
    branch = engine.add(earlier, max_tokens=5, prefix_id=parent)
    engine.run()
    assert engine.tokens[branch] == solo_output(earlier, 5)
    assert engine.finished[branch].num_cached_tokens == 26


def test_a_branch_of_a_prompt_that_is_still_being_computed() -> None:
    engine = Engine(max_num_batched_tokens=20)
    engine.num_requests = 1
    prompt = list(range(200, 250))
    parent = engine.add(prompt, max_tokens=3)
    engine.step()
    branch = engine.add(prompt, max_tokens=3, prefix_id=parent)
    engine.run()
    assert engine.tokens[branch] == solo_output(prompt, 3)
    assert engine.finished[branch].num_cached_tokens >= 20


def test_only_equal_tokens_under_the_same_salt_are_shared() -> None:
    engine = Engine(enable_prefix_caching=False)
    parent, tokens = living(engine, 20, 3, salt="a")
    stranger = engine.add(tokens, prefix_id=parent, salt="b")
    other = engine.add([*tokens[:9], 7, 8], prefix_id=parent, salt="a")
    engine.run()
    assert engine.finished[stranger].num_cached_tokens == 0
    assert engine.finished[other].num_cached_tokens == 9
    assert engine.tokens[other] == solo_output([*tokens[:9], 7, 8], 4)


def test_an_ended_parent_leaves_what_the_cache_has() -> None:
    engine = Engine()
    parent, tokens = living(engine, 40, 3)
    engine.scheduler.abort_requests([parent])
    branch = engine.add(tokens, prefix_id=parent)
    engine.run()
    assert engine.finished[branch].num_cached_tokens == 32
    assert engine.tokens[branch] == solo_output(tokens, 4)


def test_logprobs_of_the_prompt_are_computed_from_the_start() -> None:
    engine = Engine()
    parent, tokens = living(engine, 40, 3)
    branch = engine.add(tokens, prefix_id=parent, prompt_logprobs=0)
    engine.run()
    assert engine.finished[branch].num_cached_tokens == 0
    assert engine.prompt_logprobs[branch].token_ids == tokens[1:]


def test_an_aborted_branch_lets_go() -> None:
    engine = Engine(max_num_seqs=1)
    parent, tokens = living(engine, 20, 3)
    branches = [engine.add(tokens, prefix_id=parent) for _ in range(2)]
    engine.scheduler.park_requests(branches[1:], True)
    engine.scheduler.abort_requests([parent, *branches])
    engine.assert_empty()


def test_branches_give_way_before_anybody_is_preempted() -> None:
    engine = Engine(num_blocks=4, max_num_seqs=1)
    parent, tokens = living(engine, 20, 3)
    engine.scheduler.abort_requests([parent])
    runner = engine.add(8, max_tokens=50)
    engine.step()
    branch = engine.add(tokens, prefix_id=parent, max_tokens=20)  # the parent has ended: only the cache
    again = engine.add([1000 + runner] * 8 + engine.tokens[runner], prefix_id=runner, max_tokens=20)
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert len(engine.tokens[runner]) == 50
    assert engine.tokens[branch] == solo_output(tokens, 20)
    assert len(engine.tokens[again]) == 20
    engine.assert_empty()


def test_a_preempted_branch_goes_on_with_the_same_tokens() -> None:
    engine = Engine(num_blocks=7)
    parent, tokens = living(engine, 20, 3)
    branches = [engine.add(tokens, max_tokens=40, prefix_id=parent) for _ in range(3)]
    engine.run()
    assert engine.scheduler.stats().num_preemptions
    assert all(engine.tokens[branch] == solo_output(tokens, 40) for branch in branches)
    engine.assert_empty()


def test_a_branch_of_a_request_whose_numbers_are_not_finite_starts_anew() -> None:
    engine = Engine()
    parent, tokens = living(engine, 20, 3)
    engine.worker.failing[parent] = "not finite"
    engine.launch()  # writes garbage at its newest token
    branch = engine.add(tokens, max_tokens=9, prefix_id=parent)
    while engine.in_air:
        engine.land()
    engine.run()
    assert engine.tokens[branch] == solo_output(tokens, 9)
    assert engine.finished[branch].num_cached_tokens == 0
    engine.assert_empty()


# ----------------------------------------------------------------------------------------------------------------- pins
@pytest.mark.parametrize("num_tokens", SIZES)
def test_a_pinned_prefix_is_computed_once(num_tokens: int) -> None:
    engine = Engine()
    prefix = list(range(300, 300 + num_tokens))
    pin(engine, PIN, prefix)
    engine.add(prefix, max_tokens=1, prefix_id=PIN)
    engine.run()
    num_blocks = -(-num_tokens // 16)
    assert engine.scheduler.stats().num_pinned_blocks == num_blocks
    for tail in ([7], [8] * 20):
        before = num_prefilled(engine)
        request = engine.add(prefix + tail, max_tokens=3, prefix_id=PIN)
        engine.run()
        assert engine.tokens[request] == solo_output(prefix + tail, 3)
        assert num_prefilled(engine) - before == len(tail)
    engine.scheduler.unpin_prefixes([PIN, 6])
    engine.assert_empty()


def test_a_pin_outlives_all_that_the_cache_forgets() -> None:
    engine = Engine(num_blocks=10)
    prefix = list(range(300, 340))
    pin(engine, PIN, prefix)
    engine.add(prefix, max_tokens=1, prefix_id=PIN)
    engine.run()
    for _ in range(5):
        engine.add(100, max_tokens=3)  # all other blocks
        engine.run()
    request = engine.add([*prefix, 7], prefix_id=PIN)
    engine.run()
    assert engine.finished[request].num_cached_tokens == 40


def test_pins_give_way_to_a_request_that_needs_all_blocks_and_are_filled_again() -> None:
    engine = Engine(num_blocks=10)
    prefix = list(range(300, 340))
    pin(engine, PIN, prefix)
    engine.add(prefix, max_tokens=1, prefix_id=PIN)
    engine.run()
    large = engine.add(140, max_tokens=5)
    engine.run()
    assert engine.tokens[large] == solo_output([1000 + large] * 140, 5)
    assert engine.scheduler.stats().num_pinned_blocks == 0
    engine.add([*prefix, 7], prefix_id=PIN)
    engine.run()
    assert engine.scheduler.stats().num_pinned_blocks == 3


def test_a_pin_outlives_reset_and_sleep_by_name() -> None:
    engine = Engine()
    prefix = list(range(300, 340))
    pin(engine, PIN, prefix)
    for forget in (engine.scheduler.reset_prefix_cache, engine.scheduler.fall_asleep):
        engine.add(prefix, max_tokens=1, prefix_id=PIN)
        engine.run()
        assert engine.scheduler.stats().num_pinned_blocks == 3
        forget()
        engine.scheduler.asleep = False
        engine.assert_empty()
    engine.worker.rows.clear()
    request = engine.add([*prefix, 7], prefix_id=PIN)
    engine.run()
    assert engine.finished[request].num_cached_tokens == 0


def test_a_pin_is_not_filled_under_another_salt_or_by_a_failed_request() -> None:
    engine = Engine()
    prefix = list(range(300, 340))
    pin(engine, PIN, prefix, "a")
    engine.add(prefix, max_tokens=1, prefix_id=PIN, salt="b")
    failing = engine.add(prefix, max_tokens=1, prefix_id=PIN, salt="a")
    engine.worker.failing[failing] = "not finite"
    engine.run()
    assert engine.scheduler.stats().num_pinned_blocks == 0
    engine.assert_empty()


def test_unpinned_while_its_requests_run() -> None:
    engine = Engine()
    prefix = list(range(300, 340))
    pin(engine, PIN, prefix)
    engine.add(prefix, max_tokens=1, prefix_id=PIN)
    engine.run()
    request = engine.add([*prefix, 7], max_tokens=9, prefix_id=PIN)
    engine.step()
    engine.scheduler.unpin_prefixes([PIN])
    engine.run()
    assert engine.tokens[request] == solo_output([*prefix, 7], 9)
    engine.assert_empty()
