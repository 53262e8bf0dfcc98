"""A branch reads shared blocks and a copy of the last one: its tokens are those of the request that it left."""

from __future__ import annotations

import pytest
import torch

from asyncllm.wire.step import NewRequest
from tests.support.runner import Driver, make_runner
from tests.support.sampling import sampling

BACKENDS = ["reference", "cpu", pytest.param("device", marks=pytest.mark.triton)]
PROMPT = [5, 9, 2, 44, 17, 3]


@pytest.mark.parametrize("num_output_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_goes_on_as_its_parent_does_and_leaves_it_alone(backend: str, num_output_tokens: int) -> None:
    whole = Driver(make_runner(backend=backend))
    whole.add(0, PROMPT, sampling())
    expected = whole.generate(14)[0]

    driver = Driver(make_runner(backend=backend))
    parent = driver.add(0, PROMPT, sampling())
    driver.generate(num_output_tokens)
    step = driver.plan({0: 1})  # the parent writes on, into the block that is copied
    branches = []
    for request_id in (1, 2):
        branch = driver.add(request_id, [*PROMPT, *expected[:num_output_tokens]], sampling())
        num_shared = len(branch.prompt) - 1
        num_full = num_shared // driver.block_size
        branch.slot, branch.computed = driver.free_slots.pop(), len(branch.prompt)
        branch.blocks = [*parent.blocks[:num_full], driver.free_blocks.pop()]
        if num_shared % driver.block_size:
            step.copied_blocks += [parent.blocks[num_full], branch.blocks[-1]]
        step.new_requests.append(
            NewRequest(
                branch.slot, request_id, branch.prompt, len(branch.prompt), num_shared, branch.blocks, branch.sampling
            )
        )
        step.slots.append(branch.slot)
        step.num_scheduled_tokens.append(1)
        step.total_num_tokens += 1
        branches.append(branch)
    driver.finish_step({0: 1, 1: 1, 2: 1}, driver.runner.execute(step).result())
    driver.generate(9)
    assert [branch.output for branch in branches] == [expected[num_output_tokens:][:9]] * 2
    assert parent.output == expected[:9]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_blocks_are_read_before_one_is_written(backend: str) -> None:
    runner = make_runner(backend=backend, num_blocks=4)
    for cache in runner.kv_caches:
        for part in cache if isinstance(cache, tuple) else (cache,):
            part.normal_()
    before = [contents(runner, block_id) for block_id in range(5)]
    runner.backend.copy_blocks(runner.kv_caches, torch.tensor([1, 2]), torch.tensor([2, 3]))
    after = [contents(runner, block_id) for block_id in range(5)]
    for block_id, source in enumerate([0, 1, 1, 2, 4]):
        assert torch.equal(after[block_id], before[source])


def contents(runner: object, block_id: int) -> torch.Tensor:
    """Return the numbers of a block over all layers, whatever the layout."""
    found = []
    for cache in runner.kv_caches:  # type: ignore[attr-defined]
        parts = [part.view(5, -1) for part in cache] if isinstance(cache, tuple) else [cache]
        found += [part.select(0 if isinstance(cache, tuple) else 1, block_id).flatten() for part in parts]
    return torch.cat(found).clone()
