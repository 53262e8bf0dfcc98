"""Case 106: new, finished, unscheduled, resumed and unchanged requests update the batch, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.device_runtime import CpuRuntime
from asyncllm.worker.input_batch import InputBatch
from tests.support.runner import Driver, make_runner
from tests.support.sampling import sampling


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(CpuRuntime(), num_slots=4, max_model_len=16, block_size=4, vocab_size=50, eos_token_ids=(2,))


def new(slot: int, token_ids: list[int], params: EngineSampling | None = None, **fields: object) -> NewRequest:
    values = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "block_ids": [slot + 1], **fields}
    return NewRequest(slot=slot, request_id=100 + slot, token_ids=token_ids, sampling=params or sampling(), **values)  # pyright: ignore[reportArgumentType]


def step(**fields: object) -> SchedulerOutput:
    return SchedulerOutput(1, [], [], 0, **fields)  # pyright: ignore[reportArgumentType]


def test_case106_a_new_request_fills_its_slot(batch: InputBatch) -> None:
    params = sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1, sample_index=2, logprobs=5)
    batch.apply(step(new_requests=[new(2, [4, 5, 6], params, num_computed_tokens=1, block_ids=[8, 9])]))
    assert batch.tokens[2, :3].tolist() == [4, 5, 6]
    assert (batch.num_tokens[2], batch.num_prompt_tokens[2], batch.num_computed_tokens[2]) == (3, 3, 1)
    assert batch.block_table.block_ids(2) == [8, 9]
    columns = batch.sampling
    assert columns.temperature[2] == 0.5
    assert columns.top_k[2] == 3
    assert columns.top_p[2] == np.float32(0.9)
    assert columns.min_p[2] == np.float32(0.1)
    assert columns.parameters["seed"][2] == 2**64 - 1
    assert columns.parameters["sample_index"][2] == 2
    assert columns.num_logprobs[2] == 5
    assert batch.slot_to_request_id == {2: 102}


def test_case106_a_finished_request_leaves_nothing_for_the_next_owner(batch: InputBatch) -> None:
    loud = sampling(presence_penalty=1.0, logprobs=3, prompt_logprobs=2, temperature=1.0)
    batch.apply(step(new_requests=[new(1, [4] * 9, loud, block_ids=[1, 2, 3])]))
    batch.apply(step(freed_slots=[1], new_requests=[new(1, [7, 8])]))
    assert batch.slot_to_request_id == {1: 101}
    assert batch.block_table.ids[1].tolist() == [2, 0, 0, 0, 0]
    assert batch.num_tokens[1] == 2
    assert not batch.sampling.adjusted
    assert not batch.slot_to_prompt_logprobs
    metadata = batch.sampling.select(np.array([1]))
    assert metadata.all_greedy
    assert metadata.adjustments is None
    assert metadata.logprob_rows is None


def test_case106_unscheduled_and_unchanged_requests_keep_their_state(batch: InputBatch) -> None:
    batch.apply(step(new_requests=[new(0, [1, 2]), new(3, [3, 4, 5], sampling(temperature=1.0))]))
    before, version = batch.tokens.clone(), batch.version
    batch.apply(step(block_slots=[3], block_ids=[[11, 12]]))
    assert torch.equal(batch.tokens, before)
    assert batch.version == version
    assert batch.block_table.block_ids(0) == [1]
    assert batch.block_table.block_ids(3) == [4, 11, 12]


def test_case106_a_resumed_request_comes_with_its_output(batch: InputBatch) -> None:
    params = sampling(prompt_logprobs=1)
    batch.apply(step(new_requests=[new(0, [1, 2, 3, 9, 9], params, num_prompt_tokens=3)]))
    assert (batch.num_tokens[0], batch.num_prompt_tokens[0]) == (5, 3)
    assert not batch.slot_to_prompt_logprobs  # reported before


def test_two_requests_never_share_a_slot(batch: InputBatch) -> None:
    batch.apply(step(new_requests=[new(0, [1])]))
    with pytest.raises(AssertionError, match="slot 0 is taken by 100"):
        batch.apply(step(new_requests=[new(0, [1])]))


def test_case106_sampling_metadata_is_made_again_only_on_change() -> None:
    driver = Driver(make_runner())
    runner = driver.runner
    made: list[list[int]] = []
    select = runner.batch.sampling.select

    def counting(slots: np.ndarray) -> object:
        made.append(slots.tolist())
        return select(slots)

    runner.batch.sampling.select = counting  # pyright: ignore[reportAttributeAccessIssue]
    driver.add(0, [1, 2, 3], sampling())
    driver.add(1, [4, 5], sampling(temperature=1.0))
    driver.step({0: 3, 1: 2})
    for _ in range(5):
        driver.step({0: 1, 1: 1})  # crosses a block border on the way
    assert len(made) == 1
    driver.step({1: 1, 0: 1})  # another order
    driver.step({0: 1})  # one left out
    driver.step({0: 1, 1: 1})
    assert len(made) == 4
    driver.release(1)
    driver.step({0: 1})
    driver.step({0: 1})
    assert len(made) == 5
