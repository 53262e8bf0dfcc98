"""Scheduler and runner together, two steps out: the same tokens as one at a time, also with memory of the device's own.

Few blocks and slots, chunks, a stop: requests are preempted, and slots and blocks change hands, with steps in flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import pytest

from asyncllm.config import EngineConfig
from asyncllm.core.scheduler import Scheduler
from asyncllm.wire.messages import EngineCoreRequest, EngineFinishReason, EngineSampling, SchedulerStats
from asyncllm.wire.step import SchedulerOutput
from asyncllm.worker.step_result import StepResult
from tests.support.runner import POISON, make_runner
from tests.support.sampling import sampling

NUM_BLOCKS = 12
PROMPTS = [[5, 9, 2, 44, 17], [3], [8] * 21, list(range(10, 43)), [5, 9, 2, 44, 17, 61], [7, 7, 7, 1, 2, 3, 90, 4, 5]]
PARAMS = [
    sampling(max_tokens=14),
    sampling(max_tokens=12, temperature=1.0, seed=1),
    sampling(max_tokens=1, temperature=0.8, top_k=20, seed=2),
    sampling(max_tokens=9, temperature=1.2, top_p=0.9, seed=3, min_tokens=3),
    sampling(max_tokens=14, repetition_penalty=1.3, frequency_penalty=0.2),
    sampling(max_tokens=10, temperature=1.0, min_p=0.02, seed=1, logprobs=2, prompt_logprobs=0),
]


@dataclass
class Outcome:
    tokens: dict[int, list[int]]
    reasons: dict[int, int]
    stats: SchedulerStats


def run(backend: str, depth: int, prompts: list[list[int]], params: list[EngineSampling]) -> Outcome:
    """Return what comes of the prompts, ``depth`` steps out at a time."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    runner = make_runner(backend=backend, num_slots=4, num_blocks=NUM_BLOCKS, max_num_batched_tokens=16)
    config = EngineConfig.from_options("none", block_size=4, **limits)
    scheduler = Scheduler(config, num_blocks=NUM_BLOCKS, max_model_len=60, eos_token_ids=(0,))
    outcome = Outcome({}, {}, scheduler.stats())
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        scheduler.add_request(EngineCoreRequest(index, prompt, one))
    out: deque[tuple[SchedulerOutput, StepResult]] = deque()
    while True:
        while len(out) < depth and (step := scheduler.schedule()) is not None:
            out.append((step, runner.execute(step)))
        if not out:
            break
        step, pending = out.popleft()
        outputs = scheduler.update_from_output(step, pending.result())
        scheduler.check_integrity()
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            outcome.tokens.setdefault(request_id, []).append(token_id)
        outcome.reasons |= {row.request_id: row.reason for row in outputs.finished}
    outcome.stats = scheduler.stats()
    assert outcome.stats.num_free_blocks == NUM_BLOCKS
    return outcome


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("device", marks=pytest.mark.triton)])
def test_tokens_do_not_depend_on_how_many_steps_are_out(backend: str) -> None:
    in_turn = run(backend, 1, PROMPTS, PARAMS)
    stop = in_turn.tokens[0][6]
    stopped = [msgspec.structs.replace(PARAMS[0], stop_token_ids=[stop]), *PARAMS[1:]]
    overlapped = run(backend, 2, PROMPTS, stopped)
    expected = in_turn.tokens | {0: in_turn.tokens[0][: in_turn.tokens[0].index(stop) + 1]}
    assert overlapped.tokens == expected
    assert overlapped.reasons[0] == EngineFinishReason.STOP
    assert overlapped.stats.num_preemptions > 0
    assert overlapped.stats.num_dropped_tokens > 0


@pytest.mark.parametrize("backend", ["reference", pytest.param("device", marks=pytest.mark.triton)])
def test_a_request_that_is_not_finite_fails_alone_with_its_next_step_out(backend: str) -> None:
    prompts = [PROMPTS[0], [1, 2, 3, 4, POISON, 3, 4], PROMPTS[5]]
    outcome = run(backend, 2, prompts, [PARAMS[0], sampling(max_tokens=8), PARAMS[5]])
    alone = run(backend, 1, [PROMPTS[0], PROMPTS[5]], [PARAMS[0], PARAMS[5]])
    assert outcome.reasons[1] == EngineFinishReason.ERROR
    assert outcome.tokens == {0: alone.tokens[0], 2: alone.tokens[1]}
