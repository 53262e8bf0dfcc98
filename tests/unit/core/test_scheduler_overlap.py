"""Steps are launched before the ids of earlier ones are known: ends that come late, preemptions, blocks that leave."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.wire.messages import EngineFinishReason
from tests.support.scheduling import EOS, Engine, solo_output

DEPTHS = [1, 2, 3]


def launch(engine: Engine, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        assert engine.launch() is not None


def num_free(engine: Engine) -> int:
    return engine.scheduler.kv.pool.num_free_blocks


# -------------------------------------------------------------------------------------------------------------- the end
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "end",
    [
        pytest.param({"forced": [11, EOS]}, id="eos"),
        pytest.param({"forced": [11, 12], "stop_token_ids": [12]}, id="stop"),
        pytest.param({"forced": [EOS, EOS], "min_tokens": 2}, id="min_tokens"),
    ],
)
def test_what_is_drawn_after_a_stop_is_dropped_and_counted(depth: int, end: dict[str, Any]):
    engine = Engine()
    a, b = engine.add(8, max_tokens=9, **end), engine.add(8, max_tokens=9)
    engine.run(depth=depth)
    assert engine.tokens == {a: end["forced"], b: solo_output([1001] * 8, 9)}
    assert engine.finished[a].reason == EngineFinishReason.STOP
    stats = engine.scheduler.stats()
    assert (stats.num_dropped_tokens, stats.num_generated_tokens) == (depth - 1, 11)
    assert engine.worker.num_drawn == 11 + depth - 1
    engine.assert_empty()


@pytest.mark.parametrize("depth", DEPTHS)
def test_repetition_ends_a_request_when_the_ids_are_known(depth: int):
    from asyncllm.wire.messages import RareSampling

    engine = Engine()
    rare = RareSampling(repetition=(1, 1, 3))
    a = engine.add(8, max_tokens=20, forced=[11, 12, 12, 12, 13], rare=rare)
    engine.run(depth=depth)
    assert engine.tokens[a] == [11, 12, 12, 12]
    assert engine.finished[a].reason == EngineFinishReason.REPETITION
    assert engine.scheduler.stats().num_dropped_tokens == depth - 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        pytest.param({"max_model_len": 20}, 12, id="context"),
        pytest.param({"num_blocks": 4, "block_size": 4}, 9, id="blocks"),  # the last token needs no KV
    ],
)
def test_no_row_is_computed_that_is_over_by_length(depth: int, options: dict[str, int], num_tokens: int):
    engine = Engine(**options)
    a = engine.add(8, max_tokens=1000)
    engine.run(depth=depth)
    assert engine.tokens[a] == solo_output([1000] * 8, num_tokens)
    assert engine.worker.num_drawn == num_tokens
    engine.assert_empty()


# --------------------------------------------------------------------------------------------------- blocks that leave
@pytest.mark.parametrize("soft", [False, True])
def test_blocks_of_an_ended_request_are_free_when_the_steps_that_were_out_have_ended(soft: bool):
    engine = Engine(num_blocks=10, block_size=4)
    a = engine.add(8, max_tokens=9)
    launch(engine, 2)
    (engine.scheduler.finish_requests if soft else engine.scheduler.abort_requests)([a])
    found = [num_free(engine)]
    assert engine.scheduler.stats().num_free_blocks == 10  # nobody holds any
    while engine.in_air:
        engine.land()
        found.append(num_free(engine))
    assert found == [7, 7, 10]
    assert engine.tokens[a] == []
    assert engine.scheduler.stats().num_dropped_tokens == 2


def test_the_slot_changes_hands_at_once_and_the_blocks_do_not():
    engine = Engine(num_blocks=6, block_size=4, max_num_seqs=1)
    a = engine.add(9, max_tokens=9)
    launch(engine)
    engine.scheduler.abort_requests([a])
    b = engine.add(9, max_tokens=2)
    launch(engine)
    assert engine.worker.rows[0].request_id == b
    assert not {1, 2, 3} & set(engine.worker.rows[0].block_ids)
    engine.run()
    assert engine.tokens == {a: [], b: solo_output([1001] * 9, 2)}


def test_nobody_is_preempted_for_a_block_that_is_leaving():
    engine = Engine(num_blocks=7, block_size=4)
    a, b, c = (engine.add(n, max_tokens=m) for n, m in ((8, 20), (4, 8), (4, 8)))
    for _ in range(4):
        engine.step()
    assert num_free(engine) == 0
    launch(engine)
    engine.scheduler.abort_requests([a])
    assert engine.launch() is None  # both wait for their third block
    engine.run(depth=2)
    assert [engine.finished[i].num_preemptions for i in (b, c)] == [0, 0]
    assert engine.tokens[c] == solo_output([1002] * 4, 8)


def test_an_urgent_request_waits_for_blocks_that_are_leaving_and_nobody_makes_room():
    engine = Engine(num_blocks=8, block_size=4, policy="priority")
    a, b = engine.add(12, max_tokens=3, priority=5), engine.add(4, max_tokens=3, priority=5)
    launch(engine)
    engine.scheduler.abort_requests([a])
    urgent = engine.add(16, max_tokens=2, priority=0)
    step = engine.launch()  # b alone: the blocks of a are still written to
    assert step is not None
    assert engine.scheduled(step) == {b: 1}
    engine.land()
    step = engine.launch()
    assert step is not None
    assert engine.scheduled(step) == {urgent: 16, b: 1}
    engine.run()
    assert engine.finished[b].num_preemptions == 0


def test_an_urgent_request_that_must_wait_preempts_nobody_who_is_in_the_step_already():
    engine = Engine(num_blocks=6, block_size=4, policy="priority")
    others = [engine.add(4, max_tokens=9, priority=5) for _ in range(2)]
    a = engine.add(8, max_tokens=9, priority=5)
    launch(engine)
    engine.scheduler.abort_requests([a])
    urgent = engine.add(8, max_tokens=2, priority=0)  # fits with what a gives back, until the others take a block each
    step = engine.launch()
    assert step is not None
    assert engine.scheduled(step) == dict.fromkeys(others, 1)
    engine.run(depth=2)
    assert engine.tokens[urgent] == solo_output([1003] * 8, 2)
    assert [engine.tokens[i] for i in others] == [solo_output([1000 + i] * 4, 9) for i in others]


@pytest.mark.parametrize("depth", DEPTHS)
def test_preemption_is_as_rare_as_without_overlap(depth: int):
    engine = Engine(num_blocks=15, block_size=4)
    a, b = engine.add(8, max_tokens=32), engine.add(8, max_tokens=32)  # 10 blocks each
    engine.run(depth=depth)
    assert engine.tokens == {i: solo_output([1000 + i] * 8, 32) for i in (a, b)}
    assert engine.finished[a].num_preemptions == 0
    assert 1 <= engine.finished[b].num_preemptions <= 3
    engine.assert_empty()


# ------------------------------------------------------------------------------------------ preempted with a sample out
def test_a_token_that_arrives_while_its_request_waits_is_kept():
    engine = Engine(block_size=4)
    a = engine.add(8, max_tokens=5, logprobs=0, prompt_logprobs=0)
    launch(engine, 2)
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    while engine.in_air:
        engine.land()
    assert engine.tokens[a] == solo_output([1000] * 8, 2)
    step = engine.step()
    assert len(step.new_requests[0].token_ids) == 10
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 5)
    assert engine.logprobs[a].token_ids == engine.tokens[a]
    assert engine.prompt_logprobs[a].token_ids == [1000] * 7
    assert engine.scheduler.stats().num_dropped_tokens == 0


def test_a_token_that_arrives_after_its_request_came_back_is_dropped_and_drawn_again():
    engine = Engine(block_size=4)
    a = engine.add(8, max_tokens=5, logprobs=0, prompt_logprobs=0)
    launch(engine, 3)
    engine.land()
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.land()  # kept
    step = engine.launch()  # back, while the third token is still out
    assert step is not None
    assert len(step.new_requests[0].token_ids) == 10
    engine.land()
    assert len(engine.tokens[a]) == 2
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 5)
    assert engine.logprobs[a].token_ids == engine.tokens[a]
    assert engine.prompt_logprobs[a].token_ids == [1000] * 7
    assert engine.scheduler.stats().num_dropped_tokens == 1


@pytest.mark.parametrize("forced", [None, [11, EOS]], ids=["length", "eos"])
@pytest.mark.parametrize("parked", [False, True])
def test_a_request_may_end_while_it_waits(forced: list[int] | None, parked: bool):
    engine = Engine()
    a = engine.add(8, max_tokens=2, forced=forced)
    launch(engine, 2)
    engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.scheduler.park_requests([a], parked)
    while engine.in_air:
        engine.land()
    assert engine.tokens[a] == (forced or solo_output([1000] * 8, 2))
    assert a in engine.finished
    engine.assert_empty()


def test_prompt_logprobs_that_arrive_after_a_preemption_are_sent_once():
    engine = Engine(max_num_batched_tokens=7)
    prompt = list(range(100, 135))
    a = engine.add(prompt, max_tokens=3, prompt_logprobs=1)
    launch(engine, 3)
    engine.land()
    engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.land()  # while it waits
    launch(engine)  # it starts again, while its third chunk is out
    engine.run(depth=3)
    assert engine.prompt_logprobs[a].token_ids[::2] == prompt[1:]
    assert engine.tokens[a] == solo_output(prompt, 3)


# -------------------------------------------------------------------------------------------------------- what is known
def test_a_parked_request_gets_the_tokens_that_were_out_and_goes_on():
    engine = Engine()
    a = engine.add(8, max_tokens=5)
    launch(engine, 2)
    engine.scheduler.park_requests([a], True)
    assert engine.launch() is None
    while engine.in_air:
        engine.land()
    assert len(engine.tokens[a]) == 2
    engine.scheduler.park_requests([a], False)
    engine.run(depth=2)
    assert engine.tokens[a] == solo_output([1000] * 8, 5)
    assert engine.finished[a].num_preemptions == 0


def test_a_block_with_a_token_whose_id_is_unknown_is_not_found():
    engine = Engine(block_size=4)
    prompt = [5] * 6
    a = engine.add(prompt, max_tokens=9)
    launch(engine, 4)  # tokens 6, 7 and 8 are computed, and no id is known
    engine.scheduler.abort_requests([a])
    assert engine.scheduler.kv.pool.num_cached_blocks == 1
    b = engine.add([*prompt, *solo_output(prompt, 3)], max_tokens=2)
    engine.run()
    assert engine.finished[b].num_cached_tokens == 4


def test_blocks_are_cached_as_their_ids_arrive():
    engine = Engine(block_size=4)
    prompt = [5] * 6
    a = engine.add(prompt, max_tokens=6)
    engine.run(depth=3)
    assert engine.scheduler.kv.pool.num_cached_blocks == 2  # of 11 computed tokens
    b = engine.add([*prompt, *engine.tokens[a]], max_tokens=1)
    engine.run()
    assert engine.finished[b].num_cached_tokens == 8


def test_reset_does_not_wait_for_blocks_that_are_leaving():
    engine = Engine(block_size=4)
    a = engine.add(8, max_tokens=5)
    launch(engine)
    engine.scheduler.abort_requests([a])
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.kv.pool.num_cached_blocks == 0
    engine.land()
    engine.assert_empty()
    engine.scheduler.check_integrity()


# --------------------------------------------------------------------------------------------------------- failed rows
def test_who_reads_what_a_failed_row_wrote_starts_anew():
    engine = Engine(block_size=4, max_num_batched_tokens=8)
    a = engine.add([5] * 16 + [6], max_tokens=4)
    b = engine.add([5] * 16 + [7], max_tokens=4)
    c = engine.add(4, max_tokens=4)
    engine.worker.failing[a] = "logits are not finite"
    launch(engine, 3)  # b has found a's blocks
    engine.run(depth=3)
    assert engine.finished[a].reason == EngineFinishReason.ERROR
    assert engine.tokens == {a: [], b: solo_output([5] * 16 + [7], 4), c: solo_output([1002] * 4, 4)}
    assert (engine.finished[b].num_preemptions, engine.finished[c].num_preemptions) == (1, 0)
    engine.assert_empty()


def test_who_read_it_and_was_preempted_meanwhile_keeps_nothing_of_it():
    engine = Engine(block_size=4)
    a = engine.add([5] * 16 + [6], max_tokens=4)
    b = engine.add([5] * 16 + [7], max_tokens=4)
    engine.worker.failing[a] = "logits are not finite"
    launch(engine, 2)
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.run(depth=2)
    assert engine.finished[a].reason == EngineFinishReason.ERROR
    assert engine.tokens[b] == solo_output([5] * 16 + [7], 4)


def test_a_row_that_fails_after_its_request_ended_leaves_nothing_to_be_found():
    engine = Engine(block_size=4)
    a = engine.add([5] * 17, max_tokens=4)
    engine.worker.failing[a] = "logits are not finite"
    launch(engine)
    engine.scheduler.abort_requests([a])
    b = engine.add([5] * 17, max_tokens=2)
    launch(engine)  # b has found the blocks, which are leaving
    engine.worker.failing.clear()
    engine.run(depth=2)
    c = engine.add([5] * 17, max_tokens=2)
    engine.run()
    assert engine.tokens == {a: [], b: solo_output([5] * 17, 2), c: solo_output([5] * 17, 2)}
    assert a not in engine.finished


def test_a_prefix_that_others_computed_outlives_a_failed_row():
    engine = Engine(block_size=4)
    a = engine.add([5] * 16, max_tokens=9)
    engine.step()
    b = engine.add([5] * 16 + [6] * 8, max_tokens=4)
    engine.worker.failing[b] = "logits are not finite"
    engine.run(depth=2)
    assert engine.finished[a].num_preemptions == 0
    c = engine.add([5] * 16 + [6] * 8, max_tokens=1)
    engine.worker.failing.clear()
    engine.run()
    assert engine.finished[c].num_cached_tokens == 16
