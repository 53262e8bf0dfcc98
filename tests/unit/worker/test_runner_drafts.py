"""Scheduler and runner together with drafts, right and wrong ones: the same tokens and logprobs as without.

The drafts come from somebody who knows the right outputs and spoils them by chance, so that every number of right ones
is tried, with every kind of request, while requests are preempted and slots and blocks change hands.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncllm.config import EngineConfig
from asyncllm.core.prompt_lookup import PromptLookup
from asyncllm.core.scheduler import Scheduler
from asyncllm.wire.messages import (
    EngineCoreRequest,
    EngineFinishReason,
    EngineSampling,
    LogprobRows,
    RareSampling,
    SchedulerStats,
)
from asyncllm.wire.step import SchedulerOutput
from asyncllm.worker.drafts import confirm, spread
from asyncllm.worker.step_result import StepResult
from tests.support.runner import POISON, VOCAB, make_runner
from tests.support.sampling import sampling

NUM_BLOCKS = 14
PROMPTS = [
    [5, 9, 2, 44, 17],
    [3],
    [8] * 21,
    list(range(10, 43)),
    [5, 9, 2, 44, 17, 61],
    [7, 7, 7, 1, 2, 3, 90, 4, 5],
    [1, 2, 3],
    [60, 61],
]
PARAMS = [
    sampling(max_tokens=24),
    sampling(max_tokens=20, temperature=1.0, seed=1),
    sampling(max_tokens=18, temperature=0.8, top_k=20, seed=2, logprobs=0),
    sampling(max_tokens=19, temperature=1.2, top_p=0.9, seed=3, min_tokens=9, logit_bias={0: 6.0}),
    sampling(max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, logprobs=1),
    sampling(max_tokens=20, temperature=1.0, min_p=0.02, seed=1, logprobs=2, prompt_logprobs=0),
    sampling(max_tokens=24, temperature=1.0, seed=9, allowed_token_ids=[4, 5, 6, 7, 0], frequency_penalty=1.0),
    sampling(
        max_tokens=24,
        temperature=0.7,
        seed=5,
        bad_words=[[4], [60, 61], [9, 9, 9]],
        logprob_token_ids=[3, 1],
        logprobs=0,
        sample_index=2,
    ),
]


class Oracle(PromptLookup):
    """Proposes the right output with errors. ``None``: nothing is known, so no drafts."""

    def __init__(self, right: Sequence[int], chance: random.Random) -> None:
        super().__init__(8)
        self.right = right
        self.chance = chance

    def is_worth_waiting(self, token_ids: Sequence[int]) -> bool:
        return self.chance.random() < 0.5

    def propose(self, token_ids: Sequence[int], limit: int) -> list[int]:
        count = self.chance.randrange(0, min(limit, 5) + 1)
        drafts = list(self.right[len(token_ids) : len(token_ids) + count])
        return [draft if self.chance.random() < 0.8 else self.chance.randrange(VOCAB - 1) for draft in drafts]


@dataclass
class Outcome:
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    logprobs: dict[int, list[LogprobRows]] = field(default_factory=dict[int, list[LogprobRows]])
    reasons: dict[int, int] = field(default_factory=dict[int, int])
    stats: SchedulerStats = field(default_factory=SchedulerStats)


def run(
    backend: str,
    prompts: list[list[int]],
    params: list[EngineSampling],
    *,
    right: dict[int, list[int]] | None = None,
    depth: int = 1,
    seed: int = 0,
    **options: Any,
) -> Outcome:
    """Return what comes of the prompts; with drafts if the ``right`` outputs are known."""
    limits: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 24, **options}
    num_blocks = limits.pop("num_blocks", NUM_BLOCKS)
    runner = make_runner(backend=backend, num_slots=5, num_blocks=num_blocks, max_num_batched_tokens=24)
    config = EngineConfig.from_options("none", block_size=4, **limits)
    scheduler = Scheduler(config, num_blocks=num_blocks, max_model_len=60, eos_token_ids=(0,), lookup_step_tokens=24)
    outcome, chance = Outcome(), random.Random(seed)
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        rare = msgspec.structs.replace(one.rare or RareSampling(), num_lookup_tokens=8 if right is not None else 0)
        scheduler.add_request(EngineCoreRequest(index, prompt, msgspec.structs.replace(one, rare=rare)))
        if right is not None:
            scheduler.requests[index].lookup = Oracle([*prompt, *right.get(index, [])], chance)
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
        for request_id, rows in outputs.logprobs.items():
            outcome.logprobs.setdefault(request_id, []).append(rows)
        outcome.reasons |= {row.request_id: row.reason for row in outputs.finished}
    outcome.stats = scheduler.stats()
    return outcome


def candidates(parts: list[LogprobRows], num_tokens: int) -> tuple[list[int], np.ndarray[Any, Any], list[int]]:
    """Return ids, logprobs and ranks at the first positions."""
    count = num_tokens * parts[0].width
    return (
        [token_id for part in parts for token_id in part.token_ids][:count],
        np.array([logprob for part in parts for logprob in part.logprobs][:count]),
        [rank for part in parts for rank in part.ranks][:count],
    )


def check_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    assert found.logprobs.keys() == expected.logprobs.keys()
    for request_id, parts in found.logprobs.items():
        one = candidates(parts, len(expected.tokens[request_id]))
        other = candidates(expected.logprobs[request_id], len(expected.tokens[request_id]))
        assert (one[0], one[2]) == (other[0], other[2])
        np.testing.assert_allclose(one[1], other[1], atol=1e-4)


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return run("reference", PROMPTS, PARAMS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("device", marks=pytest.mark.triton)])
def test_tokens_and_logprobs_are_those_without_drafts(backend: str, depth: int, expected: Outcome) -> None:
    num_preemptions = 0
    for seed in range(1 if backend == "device" else 4):
        found = run(backend, PROMPTS, PARAMS, right=expected.tokens, depth=depth, seed=seed)
        check_same(found, expected)
        assert 20 < found.stats.num_accepted_drafts < found.stats.num_proposed_drafts
        assert found.stats.num_steps < expected.stats.num_steps
        num_preemptions += found.stats.num_preemptions
    assert num_preemptions > 0


def test_one_row_may_draw_more_tokens_than_there_are_rows(expected: Outcome) -> None:
    found = run("cpu", PROMPTS[:1], PARAMS[:1], right=expected.tokens, max_num_seqs=1)
    assert found.tokens[0] == expected.tokens[0]
    assert found.stats.num_accepted_drafts > 5


def test_a_wrong_draft_that_leads_to_no_number_harms_nobody(expected: Outcome) -> None:
    """The poisonous token makes the keys and values of its place, which is behind the row's end, no numbers."""
    for backend in ("reference", "cpu"):
        poisoned = {index: [*tokens[:5], POISON, *tokens[6:]] for index, tokens in expected.tokens.items()}
        found = run(backend, PROMPTS, PARAMS, right=poisoned)
        check_same(found, expected)
        assert found.stats.num_preemptions > 0
        assert EngineFinishReason.ERROR not in found.reasons.values()


def test_a_row_that_fails_with_drafts_fails_alone(expected: Outcome) -> None:
    prompts, params = [*PROMPTS[:3], [5, POISON]], PARAMS[:4]
    found = run("cpu", prompts, params, right=expected.tokens, num_blocks=60)
    assert found.reasons[3] == EngineFinishReason.ERROR
    assert {i: found.tokens[i] for i in range(3)} == {i: expected.tokens[i] for i in range(3)}


# ------------------------------------------------------------------------------------------------------- the arithmetic
def step_of(slots: list[int], drafts: dict[int, list[int]]) -> SchedulerOutput:
    return SchedulerOutput(0, slots, [], 0, draft_slots=list(drafts), draft_token_ids=list(drafts.values()))


def test_draws_stand_next_to_each_other_at_the_places_of_their_tokens() -> None:
    step = step_of([4, 2, 7], {2: [50, 51], 7: [60]})
    draws = spread(step, np.array([False, True, True]), np.array([9, 13, 6]), np.array([5, 8, 10]))
    assert draws.rows.tolist() == [1, 1, 1, 2, 2]
    assert draws.num_before.tolist() == [11, 12, 13, 5, 6]
    assert draws.flat_places.tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("drawn", "best", "taken", "is_finite"),
    [
        ([50, 51, 9], [1, 1, 1], [50, 51, 9], True),
        ([50, 8, 9], [1, 1, 1], [50, 8], True),
        ([7, 51, 9], [1, 1, 1], [7], True),
        ([7, 0, 0], [1, np.nan, np.nan], [], False),
        ([50, 51, 0], [1, 1, np.nan], [], False),
        ([50, 0, 0], [1, -np.inf, 1], [50], True),
        ([7, 0, 0], [1, 1, -np.inf], [7], True),
        ([0, 0, 0], [-np.inf, 1, 1], [], True),
    ],
)
def test_what_counts(drawn: list[int], best: list[float], taken: list[int], is_finite: bool) -> None:
    step = step_of([2, 5], {2: [50, 51]})
    rows = np.array([0, 0, 0, 1])
    found = confirm(step, rows, np.array([*drawn, 33]), np.array([*best, 1], np.float32))
    assert found == [(0, 2, taken, is_finite, True), (1, 5, [33], True, False)]
