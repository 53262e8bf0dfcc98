"""A worker without a model, and a scheduler joined to it.

The fake worker keeps KV memory: at each position it stores a fingerprint of the whole prefix up to there. It verifies
what it reads through the block tables against the tokens it was told, so a wrong block or a stale one fails at once,
and so does a block that is given away while a step that uses it is in the air. A token is a function of the tokens
before it, so each output has one right answer: :func:`solo_output`. A failing row writes garbage; its readers draw it.
After a wrong draft forced tokens are not drawn: whoever takes a draw from there is found out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.core.block_hash import HashFunction, hash_block
from asyncllm.core.scheduler import Scheduler
from asyncllm.wire.messages import EngineCoreOutputs, EngineCoreRequest, EngineSampling, FinishedRequest, LogprobRows
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

EOS = 2
VOCABULARY = 97
GARBAGE = 9


def next_token(token_ids: Sequence[int]) -> int:
    """Return the token that the fake model puts after these: 10 … 106, never :data:`EOS`."""
    return 10 + int.from_bytes(hashlib.sha256(repr(list(token_ids)).encode()).digest()[:4]) % VOCABULARY


def solo_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the fake model generates for a prompt alone."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class Row:
    """What the worker holds of one request."""

    def __init__(self, new: Any) -> None:
        self.request_id: int = new.request_id
        self.token_ids: list[int] = list(new.token_ids)
        self.num_prompt_tokens: int = new.num_prompt_tokens
        self.num_computed_tokens: int = new.num_computed_tokens
        self.block_ids: list[int] = list(new.block_ids)
        self.sampling: EngineSampling = new.sampling
        self.drafts: list[int] = []  # in the step that runs; they end ``token_ids`` then


class FakeWorker:
    """Applies the difference of each step as the wire's contract says, and checks that it is one."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.rows: dict[int, Row] = {}
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) → the prefix that ends there
        self.forced: dict[int, list[int]] = {}  # request id → tokens to emit by output position, instead of the model's
        self.failing: dict[int, str] = {}  # request id → why its row fails
        self.num_computed_tokens = 0
        self.num_drawn = 0
        self.num_copied_blocks = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.apply(step)
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            row = self.rows[slot]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
                fails = row.request_id in self.failing
                self.memory[self.place(row, position)] = () if fails else tuple(row.token_ids[: position + 1])
        output = ModelRunnerOutput(step.step_id, [])
        for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True):
            self.finish_row(slot, self.rows[slot], count, output)
        return output

    def apply(self, step: SchedulerOutput) -> None:
        for slot in step.freed_slots:
            del self.rows[slot]
        for new in step.new_requests:
            assert new.slot not in self.rows, "the slot is taken"
            assert 0 <= new.slot < self.max_num_seqs
            assert new.num_computed_tokens < len(new.token_ids), "nothing left to compute"
            self.rows[new.slot] = Row(new)
        for slot, block_ids in zip(step.block_slots, step.block_ids, strict=True):
            self.rows[slot].block_ids += block_ids
        copied = list(zip(step.copied_blocks[::2], step.copied_blocks[1::2], strict=True))
        begun = [new for new in step.new_requests if new.num_computed_tokens % self.block_size]
        wanted = [new.block_ids[new.num_computed_tokens // self.block_size] for new in begun]
        assert [target for _, target in copied] == wanted, "copies to other blocks than those of new requests"
        self.num_copied_blocks += len(copied)
        held = [
            {at: self.memory[source, at] for at in range(self.block_size) if (source, at) in self.memory}
            for source, _ in copied
        ]
        for (_, target), rows in zip(copied, held, strict=True):
            self.memory.update({(target, at): prefix for at, prefix in rows.items()})
        for slot, num_computed in zip(step.rewound_slots, step.rewound_num_computed, strict=True):
            row = self.rows[slot]
            assert num_computed < row.num_computed_tokens
            row.num_computed_tokens = num_computed
            del row.token_ids[num_computed + 1 :]
        for slot, drafts in zip(step.draft_slots, step.draft_token_ids, strict=True):
            row = self.rows[slot]
            assert drafts
            assert row.num_computed_tokens == len(row.token_ids) - 1
            assert step.num_scheduled_tokens[step.slots.index(slot)] == 1 + len(drafts)
            row.drafts = list(drafts)
            row.token_ids += drafts
        assert step.slots
        assert len(set(step.slots)) == len(step.slots), "a slot stands twice in a step"
        assert sum(step.num_scheduled_tokens) == step.total_num_tokens <= self.max_num_batched_tokens
        assert min(step.num_scheduled_tokens) >= 1
        assert all(1 <= block_id <= self.num_blocks for row in self.rows.values() for block_id in row.block_ids)

    def place(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size

    def finish_row(self, slot: int, row: Row, count: int, output: ModelRunnerOutput) -> None:
        start = row.num_computed_tokens
        row.num_computed_tokens = end = start + count
        self.num_computed_tokens += count
        assert end <= len(row.token_ids), "scheduled beyond the known tokens"
        is_garbled = False
        for position in range(end):
            held = self.memory[self.place(row, position)]
            is_garbled |= not held
            right = tuple(row.token_ids[: position + 1])
            assert not held or held == right, f"wrong KV at position {position} of {row.request_id}"
        if row.sampling.prompt_logprobs >= 0 and start < row.num_prompt_tokens - 1:
            positions = range(start + 1, min(end, row.num_prompt_tokens - 1) + 1)
            output.prompt_logprobs[slot] = logprob_rows(row.token_ids, positions, row.sampling.prompt_logprobs)
        if row.request_id in self.failing:
            output.failed[slot] = self.failing[row.request_id]
            row.token_ids += [GARBAGE] * (end == len(row.token_ids))  # something is drawn for the next step
        elif end == len(row.token_ids):
            self.num_drawn += 1
            self.draw(slot, row, output, is_garbled)
            return
        row.drafts = []
        output.token_ids.append(-1)

    def draw(self, slot: int, row: Row, output: ModelRunnerOutput, is_garbled: bool) -> None:
        drafts, row.drafts = row.drafts, []
        first = len(row.token_ids) - len(drafts)
        drawn = [
            GARBAGE if is_garbled else self.sample(row, row.token_ids[: first + nth]) for nth in range(len(drafts) + 1)
        ]
        num_right = next((nth for nth, draft in enumerate(drafts) if draft != drawn[nth]), len(drafts))
        row.token_ids[first:] = drawn
        output.token_ids.append(drawn[0])
        if drafts:
            output.more_token_ids[slot] = drawn[1 : 1 + num_right]
        if row.sampling.logprobs >= 0:
            positions = range(first, first + 1 + num_right)
            output.logprobs[slot] = logprob_rows(row.token_ids, positions, row.sampling.logprobs)

    def sample(self, row: Row, token_ids: list[int]) -> int:
        forced = self.forced.get(row.request_id, [])
        position = len(token_ids) - row.num_prompt_tokens
        is_right = row.request_id in self.failing or token_ids[row.num_prompt_tokens :] == forced[:position]
        return forced[position] if position < len(forced) and is_right else next_token(token_ids)


def logprob_rows(token_ids: Sequence[int], positions: Iterable[int], num_top: int) -> LogprobRows:
    """Return rows whose logprob is minus the position."""
    rows = LogprobRows(1 + num_top, [], [], [])
    for position in positions:
        rows.token_ids += [token_ids[position], *range(num_top)]
        rows.logprobs += [-float(position)] * (1 + num_top)
        rows.ranks += range(1 + num_top)
    return rows


class Engine:
    """A scheduler joined to a fake worker, with what the front end would have received.

    ``launch`` and ``land`` are the two halves of ``step``; several steps may be in the air.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 200,
        max_model_len: int = 4096,
        block_size: int = 16,
        hash_function: HashFunction = hash_block,
        lookup_step_tokens: int = 64,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options("none", block_size=block_size, **options)
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            hash_function=hash_function,
            lookup_step_tokens=lookup_step_tokens,
        )
        seats, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self.worker = FakeWorker(num_blocks, block_size, seats, budget)
        self.in_air: deque[tuple[SchedulerOutput, ModelRunnerOutput, set[int]]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishedRequest] = {}
        self.logprobs: dict[int, LogprobRows] = {}
        self.prompt_logprobs: dict[int, LogprobRows] = {}
        self.num_requests = 0

    def add(
        self,
        prompt: int | Sequence[int] = 8,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str | None = None,
        forced: Sequence[int] | None = None,
        prefix_id: int = 0,
        **sampling: Any,
    ) -> int:
        """Add a request and return its id; a number is the length of a prompt that no other request shares."""
        request_id = self.num_requests
        self.num_requests += 1
        prompt = [1000 + request_id] * prompt if isinstance(prompt, int) else list(prompt)
        if forced is not None:
            self.worker.forced[request_id] = list(forced)
        self.tokens[request_id] = []
        self.scheduler.add_request(
            EngineCoreRequest(request_id, prompt, EngineSampling(max_tokens, **sampling), priority, salt, prefix_id)
        )
        return request_id

    def launch(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            self.check_owners(step)
            output = self.worker.execute(step)
            used = {block_id for slot in step.slots for block_id in self.worker.rows[slot].block_ids}
            self.in_air.append((step, output, used))
        return step

    def check_owners(self, step: SchedulerOutput) -> None:
        """Verify that no block that is given out in ``step`` is used by a step in the air."""
        block_size = self.worker.block_size
        given = {block_id for block_ids in step.block_ids for block_id in block_ids}
        for new in step.new_requests:
            given |= set(new.block_ids[new.num_computed_tokens // block_size :])
        assert all(given.isdisjoint(used) for _, _, used in self.in_air), "a block is given away too early"

    def land(self) -> EngineCoreOutputs:
        step, output, _ = self.in_air.popleft()
        outputs = self.scheduler.update_from_output(step, output)
        self.scheduler.check_integrity()
        self.receive(outputs)
        return outputs

    def step(self) -> SchedulerOutput:
        step = self.launch()
        assert step is not None, "nothing to schedule"
        while self.in_air:
            self.land()
        return step

    def receive(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            return
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert request_id not in self.finished, "a token after the end"
            self.tokens[request_id].append(token_id)
        for finished in outputs.finished:
            assert finished.request_id not in self.finished, "two ends"
            self.finished[finished.request_id] = finished
        for name in ("logprobs", "prompt_logprobs"):
            for request_id, rows in getattr(outputs, name).items():
                kept = getattr(self, name).setdefault(request_id, LogprobRows(rows.width, [], [], []))
                kept.token_ids += rows.token_ids
                kept.logprobs += rows.logprobs
                kept.ranks += rows.ranks

    def run(self, max_steps: int = 10_000, depth: int = 1) -> int:
        """Step until nothing is left to do, ``depth`` steps in the air at most, and return the number of steps."""
        for count in range(max_steps):
            self.receive(self.scheduler.take_outputs())
            while len(self.in_air) < depth and self.launch() is not None:
                pass
            if self.in_air:
                self.land()
            elif not self.scheduler.has_work():
                return count
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.requests}")

    def scheduled(self, step: SchedulerOutput) -> dict[int, int]:
        """Return request id → number of tokens of a step just launched or landed."""
        return {
            self.worker.rows[slot].request_id: count
            for slot, count in zip(step.slots, step.num_scheduled_tokens, strict=True)
        }

    def assert_empty(self) -> None:
        """Verify that no request is left and every block is free."""
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, 0)
        assert stats.num_free_blocks == self.scheduler.kv.pool.num_blocks
        assert not self.scheduler.has_unfinished()
        assert not self.scheduler.has_work()
