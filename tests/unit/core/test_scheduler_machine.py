"""Anything that may happen, in any order: the scheduler keeps its invariants and every output is the right one.

The fake worker verifies all KV it reads, :meth:`Engine.launch` and :meth:`Engine.land` call ``check_integrity`` each
time, and up to three steps are in the air: every output is what a model without any overlap gives.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from asyncllm.wire.messages import EngineFinishReason, PinPrefix, RareSampling
from tests.support.scheduling import EOS, Engine, solo_output

PREFIXES = [[], [7] * 4, [7] * 9, [7] * 8 + [8] * 8]


def modulo_three(parent: bytes, content: bytes) -> bytes:
    return bytes([(sum(parent) + sum(content)) % 3])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 24),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 40),
        threshold=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        poor_hash=st.booleans(),
        depth=st.integers(1, 3),
        lookup_step_tokens=st.sampled_from([0, 9, 64]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        threshold: int,
        policy: str,
        caching: bool,
        poor_hash: bool,
        depth: int,
        lookup_step_tokens: int,
    ) -> None:
        options: dict[str, Any] = {"hash_function": modulo_three} if poor_hash else {}
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=60,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            policy=policy,
            enable_prefix_caching=caching,
            lookup_step_tokens=lookup_step_tokens,
            **options,
        )
        self.depth = depth
        self.prompts: dict[int, tuple[list[int], int, list[int]]] = {}
        self.dropped: set[int] = set()
        self.failing: set[int] = set()

    def choose(self, data: Any) -> list[int]:
        known = sorted(self.engine.scheduler.requests) or sorted(self.prompts)  # mostly live ones
        return data.draw(st.lists(st.sampled_from(known), max_size=3)) if known else []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=12),
        max_tokens=st.integers(1, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a"]),
        prompt_logprobs=st.sampled_from([-1, -1, -1, 0]),
        stop_after=st.sampled_from([99, 99, 0, 3, 7]),
        num_lookup_tokens=st.sampled_from([0, 1, 8]),
        pattern=st.lists(st.sampled_from([1, 3, 4]), max_size=6),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        priority: int,
        salt: str | None,
        prompt_logprobs: int,
        stop_after: int,
        num_lookup_tokens: int,
        pattern: list[int],
    ) -> None:
        prompt = prefix + tail
        right = (pattern * 99)[:stop_after] or solo_output(prompt, stop_after)  # with a pattern there are drafts
        forced = [*right, EOS]
        request_id = self.engine.add(
            prompt,
            max_tokens,
            priority=priority,
            salt=salt,
            prompt_logprobs=prompt_logprobs,
            logprobs=0,
            forced=forced,
            rare=RareSampling(num_lookup_tokens=num_lookup_tokens),
        )
        self.prompts[request_id] = (prompt, max_tokens, forced)

    @precondition(lambda self: hasattr(self, "engine") and self.engine.scheduler.requests)
    @rule(data=st.data(), num_less=st.integers(0, 3), max_tokens=st.integers(1, 20))
    def branch(self, data: Any, num_less: int, max_tokens: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        request = self.engine.scheduler.requests[parent]
        prompt = request.token_ids[: max(1, len(request.token_ids) - num_less)]
        salt = request.extra_keys[0][1] if request.extra_keys else None
        if len(prompt) < 60 and 9 not in prompt:  # garbage of a request whose failure is not known yet
            branch = self.engine.add(prompt, max_tokens, salt=salt, prefix_id=parent, logprobs=0)
            self.prompts[branch] = (prompt, max_tokens, solo_output(prompt, 99))

    @rule(pin_id=st.sampled_from([-1, -2]), prefix=st.sampled_from(PREFIXES[1:]))
    def pin(self, pin_id: int, prefix: list[int]) -> None:
        self.engine.scheduler.pin_prefix(PinPrefix(pin_id, prefix))
        prompt = [*prefix, 1]
        self.prompts[self.engine.add(prompt, 3, prefix_id=pin_id, logprobs=0)] = (prompt, 3, solo_output(prompt, 99))

    @rule(pin_id=st.sampled_from([-1, -2]))
    def unpin(self, pin_id: int) -> None:
        self.engine.scheduler.unpin_prefixes([pin_id])

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        ids = self.choose(data)
        self.engine.scheduler.abort_requests(ids)
        self.dropped |= set(ids) - set(self.engine.finished)

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        self.engine.scheduler.finish_requests(self.choose(data))

    @rule(data=st.data(), parked=st.booleans())
    def park(self, data: Any, parked: bool) -> None:
        self.engine.scheduler.park_requests(self.choose(data), parked)

    @precondition(lambda self: hasattr(self, "engine") and self.prompts)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.worker.failing[request_id] = "not finite"
        self.failing.add(request_id)

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        done = self.engine.scheduler.reset_prefix_cache(reset_running)
        assert done or not reset_running
        self.engine.scheduler.check_integrity()

    @rule()
    def nap(self) -> None:
        engine = self.engine
        while engine.in_air:
            engine.land()
        assert engine.scheduler.reset_prefix_cache(reset_running=True)
        engine.scheduler.fall_asleep()
        engine.worker.rows.clear()
        engine.worker.memory.clear()
        assert engine.launch() is None
        engine.scheduler.check_integrity()
        engine.scheduler.asleep = False

    @rule()
    def collect(self) -> None:
        self.engine.receive(self.engine.scheduler.take_outputs())

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            has_work = bool(self.engine.scheduler.running or self.engine.scheduler.waiting)
            launched = self.engine.launch()
            assert launched or self.engine.in_air or not has_work, "work, but no step"
            if len(self.engine.in_air) >= self.depth or (launched is None and self.engine.in_air):
                self.engine.land()

    @rule()
    def land(self) -> None:
        if self.engine.in_air:
            self.engine.land()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.scheduler.park_requests(list(self.prompts), False)
        engine.run(max_steps=4000, depth=self.depth)
        engine.scheduler.unpin_prefixes([-1, -2])
        engine.assert_empty()
        stats = engine.scheduler.stats()
        num_first = stats.num_generated_tokens - stats.num_accepted_drafts
        assert engine.worker.num_drawn == num_first + stats.num_dropped_tokens
        for request_id, (prompt, max_tokens, right) in self.prompts.items():
            self.check_output(request_id, prompt, max_tokens, right)

    def check_output(self, request_id: int, prompt: list[int], max_tokens: int, right: list[int]) -> None:
        engine = self.engine
        capacity = 4 * engine.scheduler.kv.pool.num_blocks
        num_tokens = min(max_tokens, 60 - len(prompt), capacity + 1 - len(prompt))
        tokens = engine.tokens[request_id]
        assert tokens == right[: len(tokens)]
        if request_id not in engine.finished:
            assert request_id in self.dropped
            return
        reason = engine.finished[request_id].reason
        if reason == EngineFinishReason.STOP:
            assert len(tokens) == len(right)
        elif reason == EngineFinishReason.LENGTH:
            assert len(tokens) == num_tokens
            sent = engine.prompt_logprobs.get(request_id)
            assert sent is None or sent.token_ids == prompt[1:]
        elif reason == EngineFinishReason.ERROR:
            assert request_id in self.failing or len(prompt) > capacity
        logprobs = engine.logprobs[request_id].token_ids if tokens else []
        assert logprobs[: len(tokens)] == tokens  # a stop among drafts leaves some over


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
