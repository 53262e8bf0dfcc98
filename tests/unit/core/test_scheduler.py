"""The scheduler with a fake worker: what a step holds, and how requests end; case ids are those of the case lists."""

from __future__ import annotations

import pytest

from asyncllm.errors import AsyncLLMError, DuplicateRequestError, RequestTooLargeError
from asyncllm.wire.messages import EngineCoreRequest, EngineFinishReason, EngineSampling
from tests.support.scheduling import EOS, Engine, solo_output


# --------------------------------------------------------------------------------------------------------- one budget
def test_b50_waiting_requests_are_scheduled_in_full_in_arrival_order():
    engine = Engine()
    ids = [engine.add(20 + i) for i in range(10)]
    step = engine.launch()
    assert step is not None
    assert list(engine.scheduled(step).items()) == [(i, 20 + i) for i in ids]
    assert [new.request_id for new in step.new_requests] == ids


def test_b52_long_prefill_threshold():
    engine = Engine(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for _ in range(3):
        engine.add(800)
    counts = [engine.step().num_scheduled_tokens for _ in range(3)]
    assert counts == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_b22_b24_counts_follow_add_step_and_abort():
    engine = Engine()
    a, b, c = (engine.add() for _ in range(3))
    assert engine.scheduler.stats().num_waiting == 3
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_waiting, stats.num_running) == (0, 3)
    engine.scheduler.abort_requests([b])
    assert engine.scheduler.stats().num_running == 2
    engine.scheduler.abort_requests([a, c])
    engine.assert_empty()


def test_b27_computed_tokens_advance_when_a_step_is_scheduled():
    engine = Engine(max_num_batched_tokens=10)
    a, b = engine.add(12, max_tokens=3), engine.add(12, max_tokens=3)
    counts = []
    for _ in range(5):
        step = engine.launch()
        assert step is not None
        counts.append(engine.scheduled(step))
    assert counts == [{a: 10}, {a: 2, b: 8}, {a: 1, b: 4}, {a: 1, b: 1}, {b: 1}]
    assert engine.launch() is None
    engine.run()
    assert engine.tokens == {i: solo_output([1000 + i] * 12, 3) for i in (a, b)}


def test_b59_a_request_goes_on_while_its_sample_is_out():
    engine = Engine()
    a = engine.add(8, max_tokens=3)
    counts = []
    for _ in range(2):
        step = engine.launch()
        assert step is not None
        counts.append(engine.scheduled(step))
    b = engine.add(8, max_tokens=3)
    while (step := engine.launch()) is not None:  # all the steps that there will be, and nothing has come back
        counts.append(engine.scheduled(step))
    assert counts == [{a: 8}, {a: 1}, {a: 1, b: 8}, {b: 1}, {b: 1}]
    engine.run()
    assert engine.tokens == {a: solo_output([1000] * 8, 3), b: solo_output([1001] * 8, 3)}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_b66_no_token_is_computed_that_is_not_needed(max_tokens: int, depth: int):
    engine = Engine()
    engine.add(8, max_tokens)
    engine.run(depth=depth)
    assert engine.worker.num_computed_tokens == 8 + max_tokens - 1


def test_only_the_difference_is_sent():
    engine = Engine(block_size=4)
    engine.add(6, max_tokens=8)
    first = engine.step()
    assert [(new.block_ids, new.token_ids) for new in first.new_requests] == [([1, 2], [1000] * 6)]
    later = [engine.step() for _ in range(6)]
    assert not any(step.new_requests for step in later)
    blocks = [(step.block_slots, step.block_ids) for step in later]
    assert blocks == [([], []), ([], []), ([0], [[3]]), ([], []), ([], []), ([], [])]


def test_what_is_sent_is_not_shared_with_the_scheduler():
    engine = Engine(block_size=4)
    request = EngineCoreRequest(0, [5, 6, 7], EngineSampling(8))
    engine.tokens[0] = []
    engine.scheduler.add_request(request)
    new = engine.step().new_requests[0]
    engine.run()
    assert request.prompt_token_ids == [5, 6, 7]
    assert new.token_ids == [5, 6, 7]
    assert len(new.block_ids) == 1


def test_no_work_no_step():
    engine = Engine()
    assert engine.scheduler.schedule() is None
    assert not engine.scheduler.has_work()


def test_paused_schedules_nothing_and_goes_on():
    engine = Engine()
    a = engine.add(8, max_tokens=3)
    engine.step()
    engine.scheduler.paused = True
    assert not engine.scheduler.has_work()
    assert engine.scheduler.has_unfinished()
    assert engine.launch() is None
    engine.scheduler.paused = False
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 3)


def test_max_num_seqs_bounds_what_runs():
    engine = Engine(max_num_seqs=2)
    for _ in range(5):
        engine.add(8, max_tokens=3)
    most = 0
    while engine.scheduler.has_work():
        engine.step()
        most = max(most, engine.scheduler.stats().num_running)
    assert most == 2
    assert len(engine.finished) == 5


# --------------------------------------------------------------------------------------------------------- how it ends
def test_b54_eos_ends_only_that_request_and_is_kept():
    engine = Engine()
    a, b = engine.add(max_tokens=9, forced=[11, EOS]), engine.add(max_tokens=5)
    engine.run()
    assert engine.tokens[a] == [11, EOS]
    assert engine.finished[a].reason == EngineFinishReason.STOP
    assert engine.finished[a].stop_token_id is None
    assert (len(engine.tokens[b]), engine.finished[b].reason) == (5, EngineFinishReason.LENGTH)


def test_b55_stop_token_is_named():
    engine = Engine()
    a = engine.add(max_tokens=9, forced=[11, 12, 13], stop_token_ids=[12])
    engine.run()
    assert engine.tokens[a] == [11, 12]
    assert (engine.finished[a].reason, engine.finished[a].stop_token_id) == (EngineFinishReason.STOP, 12)


def test_b57_ignore_eos_goes_on():
    engine = Engine()
    a = engine.add(max_tokens=4, forced=[EOS, EOS, EOS, EOS], ignore_eos=True)
    engine.run()
    assert engine.tokens[a] == [EOS] * 4
    assert engine.finished[a].reason == EngineFinishReason.LENGTH


def test_r49_a_users_stop_id_holds_with_ignore_eos_even_if_it_is_eos():
    engine = Engine()
    a = engine.add(max_tokens=9, forced=[11, EOS], ignore_eos=True, stop_token_ids=[EOS])
    engine.run()
    assert (engine.tokens[a], engine.finished[a].stop_token_id) == ([11, EOS], EOS)


@pytest.mark.parametrize("stop", [EOS, 12])
def test_b58_no_stop_before_min_tokens(stop: int):
    engine = Engine()
    a = engine.add(max_tokens=9, forced=[stop, stop, stop, stop], stop_token_ids=[12], min_tokens=3)
    engine.run()
    assert engine.tokens[a] == [stop] * 3
    assert engine.finished[a].reason == EngineFinishReason.STOP


def test_stop_at_the_last_token_is_a_stop():
    engine = Engine()
    a = engine.add(max_tokens=2, forced=[11, EOS])
    engine.run()
    assert engine.finished[a].reason == EngineFinishReason.STOP


def test_r54_r56_the_context_is_used_to_its_end():
    engine = Engine(max_model_len=20)
    a, b = engine.add(8, max_tokens=1000), engine.add(19, max_tokens=1000)
    engine.run()
    assert [len(engine.tokens[i]) for i in (a, b)] == [12, 1]
    assert {engine.finished[i].reason for i in (a, b)} == {EngineFinishReason.LENGTH}


def test_failed_row_ends_that_request_only():
    engine = Engine()
    a, b = engine.add(8, max_tokens=4), engine.add(8, max_tokens=4)
    engine.step()
    engine.worker.failing[a] = "logits are not finite"
    engine.run()
    error = engine.finished[a].error
    assert error is not None
    assert (engine.finished[a].reason, error.kind) == (EngineFinishReason.ERROR, "RequestFailedError")
    assert "logits are not finite" in error.message
    assert engine.tokens[b] == solo_output([1001] * 8, 4)
    engine.assert_empty()


def test_what_a_failed_row_computed_is_not_found_again():
    engine = Engine(block_size=4)
    a = engine.add([5] * 17, max_tokens=4)
    engine.worker.failing[a] = "logits are not finite"
    engine.run()
    engine.worker.failing.clear()
    b = engine.add([5] * 17, max_tokens=1)
    engine.run()
    assert engine.finished[b].num_cached_tokens == 0


# ---------------------------------------------------------------------------------------------------- refused requests
def test_r62_what_can_never_fit_is_refused_with_the_numbers():
    engine = Engine(num_blocks=49, block_size=16)
    a, b = engine.add(1002), engine.add(8, max_tokens=3)
    assert engine.scheduler.has_work()
    engine.receive(engine.scheduler.take_outputs())
    finished = engine.finished[a]
    assert finished.reason == EngineFinishReason.ERROR
    assert finished.error is not None
    error = AsyncLLMError.from_info(finished.error)
    assert isinstance(error, RequestTooLargeError)
    assert (error.parameter, error.value, error.limit, error.request_id) == ("prompt", 1002, 784, "0")
    for number in ("1002", "63", "49", "784"):
        assert number in str(error)
    engine.run()
    assert engine.tokens[b] == solo_output([1001] * 8, 3)


@pytest.mark.parametrize(
    ("num_tokens", "kind"), [(0, "InvalidParameterError"), (20, "PromptTooLongError"), (21, "PromptTooLongError")]
)
def test_b20_r54_prompts_without_room_for_a_token_are_refused(num_tokens: int, kind: str):
    engine = Engine(max_model_len=20)
    a = engine.add(num_tokens)
    engine.run()
    error = engine.finished[a].error
    assert error is not None
    assert error.kind == kind
    engine.assert_empty()


def test_r57_a_live_id_cannot_be_added_twice():
    engine = Engine()
    a = engine.add(8, max_tokens=3)
    with pytest.raises(DuplicateRequestError):
        engine.scheduler.add_request(EngineCoreRequest(a, [1, 2], EngineSampling(3)))
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 3)


# ---------------------------------------------------------------------------------------------------- abort and finish
def test_b51_finish_removes_from_waiting_and_running_and_answers():
    engine = Engine(max_num_seqs=1)
    a, b, c = engine.add(max_tokens=50), engine.add(), engine.add(max_tokens=2)
    engine.step()
    engine.scheduler.finish_requests([a, b])
    assert list(engine.scheduler.requests) == [c]
    engine.run()
    assert [engine.finished[i].reason for i in (a, b)] == [EngineFinishReason.ABORT] * 2
    assert len(engine.tokens[a]) == 1
    engine.assert_empty()


def test_b30_unknown_and_finished_ids_are_ignored():
    engine = Engine()
    a = engine.add(max_tokens=1)
    engine.run()
    engine.scheduler.abort_requests([a, 99, a])
    engine.scheduler.finish_requests([a, 99])
    engine.scheduler.park_requests([a, 99], True)
    engine.assert_empty()


def test_r03_an_aborted_queued_request_is_never_prefilled():
    engine = Engine(max_num_seqs=1)
    a = engine.add(8, max_tokens=30)
    engine.step()
    before = engine.scheduler.stats().num_prefill_tokens
    queued = [engine.add(50) for _ in range(20)]
    engine.step()
    engine.scheduler.abort_requests(queued)
    engine.run()
    assert engine.scheduler.stats().num_prefill_tokens == before == 8
    assert engine.tokens[a] == solo_output([1000] * 8, 30)


def test_r04_abort_frees_blocks_at_once_and_the_slot_with_the_next_step():
    engine = Engine()
    ids = [engine.add(40, max_tokens=50) for _ in range(4)]
    engine.step()
    keep = engine.add(8, max_tokens=2)
    engine.scheduler.abort_requests(ids)
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, 200)
    assert sorted(engine.step().freed_slots) == [0, 1, 2, 3]
    engine.run()
    assert engine.tokens[keep] == solo_output([1004] * 8, 2)


@pytest.mark.parametrize("soft", [False, True])
def test_r05_result_for_a_request_that_ended_meanwhile_is_dropped(soft: bool):
    engine = Engine()
    a, b = engine.add(8, max_tokens=5), engine.add(8, max_tokens=5)
    engine.launch()
    (engine.scheduler.finish_requests if soft else engine.scheduler.abort_requests)([a])
    engine.land()
    engine.run()
    assert engine.tokens[a] == []
    assert (a in engine.finished) == soft
    assert engine.tokens[b] == solo_output([1001] * 8, 5)


def test_r05_result_is_not_taken_for_the_next_owner_of_the_slot():
    engine = Engine(max_num_seqs=1)
    a = engine.add(8, max_tokens=5)
    engine.launch()
    engine.scheduler.abort_requests([a])
    b = engine.add(8, max_tokens=5)
    step = engine.launch()  # takes the slot before the result for a is back
    assert step is not None
    assert step.slots == step.freed_slots == [0]
    engine.land()
    assert engine.tokens[b] == []
    engine.land()
    engine.run()
    assert engine.tokens == {a: [], b: solo_output([1001] * 8, 5)}


def test_r05_failure_and_logprobs_of_a_request_that_ended_are_dropped():
    engine = Engine()
    a = engine.add(8, max_tokens=5, logprobs=0, prompt_logprobs=0)
    b = engine.add(8, max_tokens=5)
    engine.worker.failing[b] = "broken"
    engine.launch()
    engine.scheduler.abort_requests([a, b])
    outputs = engine.land()
    assert not any((outputs.request_ids, outputs.finished, outputs.logprobs, outputs.prompt_logprobs))
    engine.assert_empty()


def test_abort_of_thousands_is_linear():
    engine = Engine(max_num_seqs=4)
    ids = [engine.add(4) for _ in range(5000)]
    engine.step()
    for request_id in ids:
        engine.scheduler.abort_requests([request_id])
    engine.assert_empty()
    assert len(engine.scheduler.waiting) == 0


# -------------------------------------------------------------------------------------------------------------- parked
def test_parked_requests_keep_their_blocks_and_are_left_out():
    engine = Engine()
    a, b = engine.add(8, max_tokens=6), engine.add(8, max_tokens=6)
    engine.step()
    engine.scheduler.park_requests([a], True)
    free = engine.scheduler.stats().num_free_blocks
    engine.run()
    assert (len(engine.tokens[a]), len(engine.tokens[b])) == (1, 6)
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_parked, stats.num_free_blocks) == (1, 1, free + 1)
    assert engine.scheduler.has_unfinished()
    assert not engine.scheduler.has_work()
    engine.scheduler.park_requests([a], False)
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 6)
    assert engine.finished[a].num_preemptions == 0


def test_a_token_that_was_out_when_its_request_was_parked_is_delivered():
    engine = Engine()
    a = engine.add(8, max_tokens=3)
    engine.launch()
    engine.scheduler.park_requests([a], True)
    engine.land()
    assert len(engine.tokens[a]) == 1
    engine.scheduler.park_requests([a], False)
    engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 3)


def test_a_parked_waiting_request_keeps_its_place():
    engine = Engine(max_num_seqs=1)
    a, b = engine.add(max_tokens=1), engine.add(max_tokens=1)
    engine.scheduler.park_requests([a], True)
    engine.scheduler.park_requests([a], False)
    assert [request.request_id for request in engine.scheduler.waiting] == [a, b]
    engine.scheduler.park_requests([a], True)
    engine.run()
    assert list(engine.finished) == [b]
    engine.scheduler.abort_requests([a])
    engine.assert_empty()


@pytest.mark.parametrize("options", [{"max_num_seqs": 4}, {"num_blocks": 11, "block_size": 4}], ids=["seats", "blocks"])
def test_r64_parked_requests_give_way_to_waiting_ones(options: dict[str, int]):
    engine = Engine(**options)
    parked = [engine.add(8, max_tokens=5) for _ in range(4)]
    for _ in range(2):
        engine.step()
    engine.scheduler.park_requests(parked, True)
    fresh = [engine.add(8, max_tokens=5) for _ in range(4)]
    engine.run()
    assert all(engine.tokens[i] == solo_output([1000 + i] * 8, 5) for i in fresh)
    engine.scheduler.park_requests(parked, False)
    engine.run()
    assert all(engine.tokens[i] == solo_output([1000 + i] * 8, 5) for i in parked)
    engine.assert_empty()


def test_a_parked_request_makes_room_before_a_running_one():
    engine = Engine(num_blocks=18, block_size=4)
    a, b, c = (engine.add(8, max_tokens=20) for _ in range(3))
    engine.step()
    engine.scheduler.park_requests([b], True)
    engine.run()
    engine.scheduler.park_requests([b], False)
    engine.run()
    assert [engine.finished[i].num_preemptions for i in (a, b, c)] == [0, 0, 0]

    engine = Engine(num_blocks=13, block_size=4)
    a, b, c = (engine.add(8, max_tokens=20) for _ in range(3))
    engine.step()
    engine.scheduler.park_requests([b], True)
    for _ in range(14):
        engine.step()
    requests = engine.scheduler.requests
    assert [requests[i].num_preemptions for i in (a, b, c)] == [0, 1, 0]


def test_the_least_urgent_parked_request_makes_room_first():
    engine = Engine(max_num_seqs=3)
    ids = [engine.add(8, max_tokens=5) for _ in range(3)]
    engine.step()
    engine.scheduler.park_requests(ids, True)
    engine.add(8, max_tokens=1)
    engine.run()
    assert [engine.scheduler.requests[i].num_preemptions for i in ids] == [0, 0, 1]


def test_a_request_that_was_parked_and_preempted_is_aborted():
    engine = Engine(max_num_seqs=1)
    a = engine.add(8, max_tokens=5)
    engine.step()
    engine.scheduler.park_requests([a], True)
    for _ in range(5):
        engine.add(8, max_tokens=3)
    engine.step()
    assert engine.scheduler.requests[a].num_preemptions == 1
    engine.scheduler.abort_requests([a])
    engine.scheduler.check_integrity()
    engine.run()
    assert len(engine.finished) == 5
    engine.assert_empty()


def test_r64_aborted_parked_requests_do_not_block_admission():
    engine = Engine(max_num_seqs=4)
    parked = [engine.add(8, max_tokens=50) for _ in range(4)]
    engine.step()
    queued = [engine.add(8, max_tokens=50) for _ in range(4)]
    engine.scheduler.park_requests(parked + queued, True)
    engine.scheduler.abort_requests(parked + queued)
    a = engine.add(8, max_tokens=3)
    engine.run()
    assert engine.tokens[a] == solo_output([1008] * 8, 3)
    engine.assert_empty()


# ---------------------------------------------------------------------------------------------------------- preemption
def test_r63_growth_beyond_the_pool_ends_with_all_tokens_delivered():
    engine = Engine(num_blocks=4, block_size=4)
    a = engine.add(8, max_tokens=1000)
    steps = engine.run()
    assert engine.tokens[a] == solo_output([1000] * 8, 9)  # 16 tokens have KV, the last one needs none
    assert engine.finished[a].reason == EngineFinishReason.LENGTH
    assert engine.finished[a].num_preemptions == 0
    assert steps == 9


@pytest.mark.parametrize("caching", [True, False])
def test_r65_r66_two_streams_in_a_pool_for_one_and_a_half(caching: bool):
    engine = Engine(num_blocks=15, block_size=4, enable_prefix_caching=caching)
    a, b = engine.add(8, max_tokens=32), engine.add(8, max_tokens=32)  # 10 blocks each
    steps = engine.run()
    assert engine.tokens == {i: solo_output([1000 + i] * 8, 32) for i in (a, b)}
    preemptions = [engine.finished[i].num_preemptions for i in (a, b)]
    assert preemptions[0] == 0
    assert 1 <= preemptions[1] <= 3
    assert steps <= 64 / 0.6
    engine.assert_empty()


def test_the_last_of_the_running_is_preempted_and_comes_back_before_fresh_ones():
    engine = Engine(num_blocks=12, block_size=4, max_num_seqs=3)
    a, b, c = (engine.add(8, max_tokens=20) for _ in range(3))
    d = engine.add(4, max_tokens=2)
    admitted: list[int] = []
    while engine.scheduler.has_work():
        admitted += [new.request_id for new in engine.step().new_requests]
    assert admitted == [a, b, c, b, c, d]  # 7 blocks each in the end: c makes room, then b, and both return in order
    assert engine.tokens == {i: solo_output([1000 + i] * (4 if i == d else 8), 2 if i == d else 20) for i in range(4)}


def test_a_resumed_request_takes_its_cached_prefix():
    engine = Engine(num_blocks=15, block_size=4)
    _, b = engine.add(8, max_tokens=32), engine.add(8, max_tokens=32)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions == engine.finished[b].num_preemptions
    assert stats.resume_hits > 0
    assert stats.num_prefill_tokens == 16 + stats.resume_queries - stats.resume_hits


def test_b62_b63_reset_with_running_requests():
    engine = Engine(block_size=4)
    ids = [engine.add([5] * 8 + [i], max_tokens=12) for i in range(3)]
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.launch()
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.scheduler.check_integrity()
    assert [request.request_id for request in engine.scheduler.waiting] == ids
    assert engine.scheduler.kv.pool.num_cached_blocks == 0
    engine.land()
    engine.run()
    assert engine.tokens == {i: solo_output([5] * 8 + [i], 12) for i in ids}


def test_b62_reset_preempts_parked_requests_too():
    engine = Engine()
    ids = [engine.add(8, max_tokens=4) for _ in range(2)]
    engine.step()
    engine.scheduler.park_requests(ids[:1], True)
    assert engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.run()
    engine.scheduler.park_requests(ids[:1], False)
    engine.run()
    assert engine.tokens == {i: solo_output([1000 + i] * 8, 4) for i in ids}
    engine.assert_empty()


# ------------------------------------------------------------------------------------------------------------ priority
def test_b64_order_is_priority_then_arrival():
    engine = Engine(policy="priority", max_num_seqs=1)
    ids = [engine.add(max_tokens=1, priority=priority) for priority in (2, 1, 0, 1, 0)]
    engine.run()
    assert list(engine.finished) == [ids[i] for i in (2, 4, 1, 3, 0)]


def test_fcfs_ignores_priority():
    engine = Engine(max_num_seqs=1)
    ids = [engine.add(max_tokens=1, priority=priority) for priority in (2, 1, 0)]
    engine.run()
    assert list(engine.finished) == ids


def test_b64_victim_is_the_lowest_priority():
    engine = Engine(policy="priority", num_blocks=15, block_size=4)
    a, b = engine.add(8, max_tokens=32, priority=1), engine.add(8, max_tokens=32, priority=0)
    engine.run()
    assert engine.finished[a].num_preemptions >= 1
    assert engine.finished[b].num_preemptions == 0
    assert engine.tokens == {i: solo_output([1000 + i] * 8, 32) for i in (a, b)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_seqs": 4}, id="seats"),
        pytest.param({"num_blocks": 20, "block_size": 4}, id="blocks"),
        pytest.param({"max_num_batched_tokens": 4, "max_num_seqs": 5}, id="budget"),
    ],
)
def test_r67_urgent_request_gets_its_first_token_within_three_steps(options: dict[str, int]):
    engine = Engine(policy="priority", **options)
    background = [engine.add(12, max_tokens=20, priority=5) for _ in range(4)]
    for _ in range(14):
        engine.step()
    urgent = engine.add(12, max_tokens=4, priority=0)
    for _ in range(3):
        engine.step()
    assert engine.tokens[urgent]
    engine.run()
    assert engine.tokens[urgent] == solo_output([1004] * 12, 4)
    assert [engine.tokens[i] for i in background] == [solo_output([1000 + i] * 12, 20) for i in background]
    engine.assert_empty()


def test_r67_urgent_request_preempts_no_more_than_it_needs():
    engine = Engine(policy="priority", max_num_seqs=4)
    background = [engine.add(12, max_tokens=20, priority=5) for _ in range(4)]
    engine.step()
    engine.add(12, max_tokens=4, priority=0)
    engine.run()
    assert [engine.finished[i].num_preemptions for i in background] == [0, 0, 0, 1]


def test_r68_preempted_request_goes_on_before_fresh_ones_of_its_class():
    engine = Engine(policy="priority", max_num_seqs=1)
    a = engine.add(8, max_tokens=5, priority=3)
    engine.step()
    urgent = engine.add(8, max_tokens=2, priority=0)
    engine.step()
    b = engine.add(8, max_tokens=5, priority=3)
    engine.run()
    assert list(engine.finished) == [urgent, a, b]
    assert engine.finished[a].num_preemptions == 1


# ------------------------------------------------------------------------------------------------------------ logprobs
def test_r61_logprobs_come_with_their_tokens():
    engine = Engine(max_num_batched_tokens=7)
    a, b = engine.add(20, max_tokens=3, logprobs=2), engine.add(20, max_tokens=3)
    engine.run()
    assert engine.logprobs[a].token_ids[::3] == engine.tokens[a]
    assert engine.logprobs[a].logprobs[::3] == [-20.0, -21.0, -22.0]
    assert b not in engine.logprobs


def test_r60_prompt_logprobs_with_chunked_prefill():
    engine = Engine(max_num_batched_tokens=7)
    prompt = list(range(100, 135))
    a = engine.add(prompt, max_tokens=3, prompt_logprobs=1)
    engine.run()
    assert engine.prompt_logprobs[a].token_ids[::2] == prompt[1:]
    assert engine.prompt_logprobs[a].logprobs[::2] == [-float(i) for i in range(1, 35)]


def test_r60_a_preemption_does_not_repeat_prompt_logprobs():
    engine = Engine(max_num_batched_tokens=7)
    prompt = list(range(100, 135))
    engine.add(4, max_tokens=3)
    a = engine.add(prompt, max_tokens=3, prompt_logprobs=1)
    for _ in range(3):
        engine.step()  # beside the other request: 3, 6 and 6 tokens
    assert len(engine.prompt_logprobs[a].ranks) == 2 * 15
    engine.scheduler.reset_prefix_cache(reset_running=True)
    engine.run()  # alone: 7 in each step, so what was sent ends within a chunk
    assert engine.finished[a].num_preemptions == 1
    assert engine.prompt_logprobs[a].token_ids[::2] == prompt[1:]
    assert engine.prompt_logprobs[a].logprobs[::2] == [-float(i) for i in range(1, 35)]


# ------------------------------------------------------------------------------------------------------------ counters
def test_b61_prefix_statistics_count_each_admission_once():
    engine = Engine(num_blocks=12, block_size=4, max_num_seqs=2)
    engine.add([5] * 12, max_tokens=5)
    engine.add([5] * 12 + [6] * 4, max_tokens=2)
    engine.add([7] * 32, max_tokens=2)  # waits for blocks, and is looked up in every step meanwhile
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (12 + 16 + 32, 12)
    assert (stats.resume_queries, stats.resume_hits) == (0, 0)


def test_b61_nothing_is_counted_without_the_prefix_cache():
    engine = Engine(num_blocks=15, block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        engine.add([5] * 8, max_tokens=32)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.resume_queries, stats.resume_hits) == (0, 0, 0, 0)
    assert stats.num_preemptions >= 1


def test_cached_tokens_are_those_of_the_first_admission():
    engine = Engine(num_blocks=15, block_size=4)
    a = engine.add([5] * 9, max_tokens=30)
    b = engine.add([5] * 9, max_tokens=30)
    engine.run()
    assert engine.finished[b].num_preemptions >= 1
    assert (engine.finished[a].num_cached_tokens, engine.finished[b].num_cached_tokens) == (0, 8)


def test_b73_nothing_is_left():
    engine = Engine()
    for i in range(50):
        engine.add(5 + i, max_tokens=1 + i % 7)
    engine.run()
    engine.assert_empty()
    scheduler = engine.scheduler
    assert not any((scheduler.running, scheduler.parked, scheduler.waiting, scheduler._step_to_rows))
    assert scheduler.stats().num_generated_tokens == sum(map(len, engine.tokens.values()))


def test_prefix_hits_are_told_with_the_first_token_so_that_an_abort_knows_them():
    engine = Engine(block_size=4, max_num_batched_tokens=6)
    engine.add([5] * 12, max_tokens=1)
    engine.run()
    cached = engine.add([5] * 12 + [6] * 8, max_tokens=9)
    told = []
    for _ in range(3):  # 12 of 20 are cached, so two chunks before the first token
        engine.launch()
        outputs = engine.land()
        told.append((outputs.token_ids != [], outputs.num_cached_tokens))
    assert told == [(False, {}), (True, {cached: 12}), (True, {})]
