"""What the next step computes, and what came of the last one. Pure: no I/O, no clock, no thread, no torch.

The one rule: each request's computed tokens catch up with its known tokens, under one token budget per step. There
is no prefill and no decode phase; a chunked prefill is a request that catches up over several steps.

One order decides everything, ``Request.urgency``: priority class, then arrival (``fcfs`` is a single class). Running
requests are served in it and preempted from its end; waiting ones are admitted from its front, and a preempted request
waits at its own place. So the most urgent request always gets on, and two never take blocks from each other in turn.

Admission gives a request a *slot* (a row of the worker's batch) and blocks for all its tokens, and leaves one block
free for each running request. So a prefill never stalls half-way, a running request needs at most one block per step,
and none is preempted in the step that admits it. Simulated with 200 requests and blocks for about 20 of them, that
headroom costs 2 % more steps and saves 9 of 10 preemptions and 40 % of the prefilled tokens.

``schedule`` moves the state to where it will be once the step has run, the token that it draws included: several steps
may be out at once, and a request goes on while the ids of its newest tokens are on their way. ``update_from_output``
adds the ids. A length ends a request ahead of time, so no row is computed beyond it; any other end is found when the id
arrives, and what the steps that are out draw after it (surplus) is dropped. Steps run in order, so a slot may change
hands at once; blocks do when the steps that are out have ended. A preempted request keeps the tokens that arrive until
it is admitted again, and draws the others a second time.

A request with a :class:`~asyncllm.core.prompt_lookup.PromptLookup` may compute *drafts* after its newest token. They
are extra: none where a step would grow beyond ``prompt_lookup_step_tokens``, none in place of the budget or the blocks
that running requests need, and none if they are few while many rows would pay for the longer step. How many tokens come
of them is known when their step has ended, so the request stays out of steps until then; one whose newest ids are on
their way waits for them if there are likely to be drafts.
"""

from __future__ import annotations

import sys
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from asyncllm.core.block_hash import HashFunction, extra_keys, hash_block
from asyncllm.core.draft_planner import DraftPlanner
from asyncllm.core.endings import describe, end_of
from asyncllm.core.kv_cache_manager import KVCacheManager
from asyncllm.core.logprobs import forward_logprobs
from asyncllm.core.request import NEVER, Request, RequestStatus, why_refused
from asyncllm.core.request_queue import RequestQueue
from asyncllm.errors import AsyncLLMError, DuplicateRequestError, ErrorInfo, RequestFailedError, UsageError
from asyncllm.wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFinishReason,
    FinishedRequest,
    PinPrefix,
    SchedulerStats,
)
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncllm.config import EngineConfig
    from asyncllm.structured.matcher import Matcher

__all__ = ["Scheduler"]

_urgency = attrgetter("urgency")


class Scheduler:
    """Owns all live requests and the KV blocks of one engine. Used by the busy-loop thread alone.

    ``num_blocks`` counts the usable blocks, ``max_model_len`` bounds prompt plus output in tokens,
    ``lookup_step_tokens`` those of a step with drafts, of which ``lookup_free_tokens`` cost as much as one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        hash_function: HashFunction = hash_block,
        lookup_step_tokens: int = 0,
        lookup_free_tokens: int = 0,
    ) -> None:
        options = config.scheduler
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(config.cache, num_blocks, hash_function)
        self.paused = False  # while set, ``schedule`` returns None
        self.asleep = False  # the same, while the workers have no KV blocks
        self.requests: dict[int, Request] = {}  # all that are live, by id
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # in order of urgency
        self.parked: dict[int, Request] = {}  # in neither of the two

        self._max_num_batched_tokens = options.max_num_batched_tokens
        self._max_chunk = options.long_prefill_token_threshold or sys.maxsize
        self._draft_planner = DraftPlanner(
            step_tokens=min(lookup_step_tokens, options.max_num_batched_tokens), free_tokens=lookup_free_tokens
        )
        self._num_lookups = 0  # live requests that have one
        self._drafts: dict[Request, list[int]] = {}  # for the step that is being made
        self._has_classes = options.policy == "priority"
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_num_seqs = options.max_num_seqs
        self._free_slots = list(reversed(range(options.max_num_seqs)))
        self._freed_slots: list[int] = []  # since the last step; the worker does not know yet
        self._step_id = 0
        self._num_arrivals = 0
        self._num_matchers = 0  # of live requests
        self._step_to_rows: dict[int, list[Request]] = {}  # steps that are out: who stands behind each row
        self._finished: list[FinishedRequest] = []  # not yet reported
        self._prefix_hits: dict[int, int] = {}  # cached tokens by request id; not yet reported
        self._preempted: dict[int, int] = {}  # number of preemptions by request id; not yet reported
        self._counters = SchedulerStats()

    # ----------------------------------------------------------------------------------------- what the front end sends
    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request; one that can never run is answered with reason ERROR instead (see :meth:`take_outputs`).

        :raises DuplicateRequestError: a live request has this id.
        """
        request_id = message.request_id
        if request_id in self.requests:
            raise DuplicateRequestError(f"request {request_id} is still running", request_id=str(request_id))
        num_blocks, block_size = self.kv.pool.num_blocks, self.kv.block_size
        refusal = why_refused(message, max_model_len=self.max_model_len, num_blocks=num_blocks, block_size=block_size)
        if refusal is not None:
            self._finished.append(FinishedRequest(request_id, EngineFinishReason.ERROR, error=describe(refusal)))
            return
        self._num_arrivals += 1
        request = Request(
            message,
            priority=message.priority if self._has_classes else 0,
            arrival=self._num_arrivals,
            max_num_tokens=min(self.max_model_len, num_blocks * block_size + 1),  # the last token needs no KV
            eos_token_ids=self._eos_token_ids,
        )
        parent = self.requests.get(message.prefix_id) if message.prefix_id else None
        if parent is not None:
            self.kv.branch(request, parent)
        self.requests[request_id] = request
        self._num_lookups += request.looks_up
        if request.is_queued:
            self.waiting.add(request)

    def set_grammar(self, request_id: int, matcher: Matcher | AsyncLLMError) -> None:
        """Let a request go on that waited for its grammar, or end it with the error; an unknown id is ignored."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if isinstance(matcher, AsyncLLMError):
            self._report(request, EngineFinishReason.ERROR, error=describe(matcher))
            self._end_all([request])
            return
        request.matcher = matcher
        request.waits_for_grammar = False
        self._num_matchers += 1
        if request.is_queued:
            self.waiting.add(request)

    def abort_requests(self, request_ids: Iterable[int]) -> None:
        """Drop requests and free what they hold at once; unknown ids are ignored, nothing is answered."""
        self._end_all(self._live(request_ids))

    def finish_requests(self, request_ids: Iterable[int]) -> None:
        """Like :meth:`abort_requests`, but answer each with reason ABORT (see :meth:`take_outputs`)."""
        ended = self._live(request_ids)
        for request in ended:
            self._report(request, EngineFinishReason.ABORT)
        self._end_all(ended)

    def park_requests(self, request_ids: Iterable[int], parked: bool) -> None:
        """Leave requests out of steps, or take them in again; unknown ids are ignored.

        A parked request keeps its slot and blocks until somebody else needs them.
        """
        for request in self._live(request_ids):
            if request.parked == parked:
                continue
            request.parked = parked
            is_running = request.status is RequestStatus.RUNNING
            if parked:
                self.parked[request.request_id] = request
            else:
                del self.parked[request.request_id]
            if request.waits_for_grammar:
                continue
            if parked:
                (self.running if is_running else self.waiting).remove(request)
            elif is_running:
                insort(self.running, request, key=_urgency)
            else:
                self.waiting.add(request)

    def pin_prefix(self, pin: PinPrefix) -> None:
        """Keep the blocks of a prefix from the first request on that computes it; see :class:`PinPrefix`."""
        self.kv.holds.pin(pin.pin_id, pin.token_ids, extra_keys(pin.cache_salt))

    def unpin_prefixes(self, pin_ids: Iterable[int]) -> None:
        """Let go of pinned prefixes; unknown ids are ignored."""
        for pin_id in pin_ids:
            self.kv.holds.unpin(pin_id)

    def _live(self, request_ids: Iterable[int]) -> list[Request]:
        return [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]

    # --------------------------------------------------------------------------------------------------------- the step
    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or ``None`` if nothing can be computed now; see the module for the order."""
        if self.paused or self.asleep or not (self.running or self.waiting):
            return None
        step = SchedulerOutput(self._step_id, [], [], 0)
        rows: list[Request] = []
        is_held = self._has_classes and not self._admit_urgent(step)
        budget = self._schedule_running(step, rows)
        if not is_held:
            budget = self._schedule_waiting(step, rows, budget)
        if not rows:
            return None
        step.total_num_tokens = self._max_num_batched_tokens - budget
        step.freed_slots, self._freed_slots = self._freed_slots, []
        if self._num_matchers:
            step.masks = _masks(rows)
        self._step_to_rows[self._step_id] = rows
        self._step_id += 1
        self._counters.num_steps += 1
        return step

    def _admit_urgent(self, step: SchedulerOutput) -> bool:
        """Admit waiting requests of a higher class than running ones, which make room; before anything is scheduled.

        ``False`` if one of them has to wait for the room: nobody is to be preempted once it is scheduled.
        """
        while self.waiting and self.running and self.waiting.peek().priority < self.running[-1].priority:
            if not self._admit(self.waiting.peek(), step):
                return False
        return True

    def _schedule_running(self, step: SchedulerOutput, rows: list[Request]) -> int:
        """First pass: serve the running requests in order; return the budget that is left."""
        budget = self._max_num_batched_tokens
        self._drafts = self._draft_planner.look_up(self.running) if self._num_lookups else {}
        add_slot, add_count, add_row = step.slots.append, step.num_scheduled_tokens.append, rows.append
        for request in self.running:  # preempted ones leave its end, where the loop has not been
            if not budget:
                break
            num_computed = request.num_computed_tokens
            if num_computed >= request.border:
                if not request.border:  # still catching up
                    budget -= self._schedule_chunk(request, step, rows, budget)
                    continue
                if num_computed + 1 >= request.max_num_tokens:
                    continue  # its last token is on its way
                if request.lookup is not None:
                    budget -= self._schedule_with_drafts(request, step, rows, budget)
                    continue
                if request.needs_its_token and num_computed == len(request.token_ids):
                    continue
                is_full = num_computed == len(request.block_ids) * self.kv.block_size
                if is_full and not self._append_block(request, step):
                    continue  # it waits for a block, or made room itself
            request.num_computed_tokens = num_computed + 1  # what was drawn last
            add_slot(request.slot)
            add_count(1)
            add_row(request)
            budget -= 1
        return budget

    def _schedule_waiting(self, step: SchedulerOutput, rows: list[Request], budget: int) -> int:
        """Second pass: admit waiting requests in order while they fit; return the budget that is left."""
        while budget and self.waiting:
            request = self.waiting.peek()
            if not self._admit(request, step):
                break
            budget -= self._schedule_chunk(request, step, rows, budget)
        return budget

    def _schedule_chunk(self, request: Request, step: SchedulerOutput, rows: list[Request], budget: int) -> int:
        """Let a request catch up as far as budget and threshold allow; return the number of tokens."""
        num_known = len(request.token_ids)
        num_new = min(num_known - request.num_computed_tokens, budget, self._max_chunk)
        request.num_computed_tokens += num_new
        if request.num_computed_tokens == num_known:
            request.set_border(len(request.block_ids) * self.kv.block_size)
        self.kv.cache_full_blocks(request)
        step.slots.append(request.slot)
        step.num_scheduled_tokens.append(num_new)
        rows.append(request)
        self._counters.num_prefill_tokens += num_new
        return num_new

    def _schedule_with_drafts(self, request: Request, step: SchedulerOutput, rows: list[Request], budget: int) -> int:
        """Let a request that has caught up compute its newest token and drafts after it; return the number of both."""
        drafts = self._drafts.get(request)
        if request.num_drafts_out or drafts == []:
            return 0  # its newest tokens are not known
        num_computed = request.num_computed_tokens
        if num_computed == len(request.block_ids) * self.kv.block_size and not self._append_block(request, step):
            return 0
        if drafts and budget > len(self.running):
            self._add_drafts(request, drafts[: budget - len(self.running)], step)
        if request.is_rewound:
            request.is_rewound = False
            step.rewound_slots.append(request.slot)
            step.rewound_num_computed.append(num_computed)
        request.num_computed_tokens = num_computed + 1
        step.slots.append(request.slot)
        step.num_scheduled_tokens.append(1 + request.num_drafts_out)
        rows.append(request)
        return 1 + request.num_drafts_out

    def _add_drafts(self, request: Request, drafts: list[int], step: SchedulerOutput) -> None:
        """Add those of ``drafts`` to a row for which there are blocks that no running request will need."""
        block_size = self.kv.block_size
        num_tokens = request.num_computed_tokens + 1 + len(drafts)
        while len(request.block_ids) * block_size < num_tokens and self.kv.pool.num_free_blocks > len(self.running):
            self._append_block(request, step)
        request.num_drafts_out = min(len(drafts), len(request.block_ids) * block_size - num_tokens + len(drafts))
        if request.num_drafts_out:
            step.draft_slots.append(request.slot)
            step.draft_token_ids.append(drafts[: request.num_drafts_out])

    def _append_block(self, request: Request, step: SchedulerOutput) -> bool:
        """Give a running request its next block; parked and less urgent ones make room.

        ``False`` if it had to make room itself, or has to wait for a block that is leaving.
        """
        while not self.kv.pool.num_free_blocks:
            if self.kv.num_leaving_blocks():
                return False
            if self.kv.holds.drop_branches():
                continue
            victim = self._parked_victim() or self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        step.block_slots.append(request.slot)
        step.block_ids.append(self.kv.append_block(request))
        request.set_border(request.border + self.kv.block_size)
        return True

    def _admit(self, request: Request, step: SchedulerOutput) -> bool:
        """Move the first of the waiting to the running, with a slot and blocks for all its tokens.

        Parked requests and those of a lower class make room. ``False`` if that is not enough, or not yet.
        """
        while not (self._free_slots and self.kv.allocate(request, len(self.running))):
            if self._free_slots and self.kv.num_leaving_blocks() and self.kv.will_fit(request, len(self.running)):
                return False
            victim = self._parked_victim()
            if victim is None:
                if not self.running and (self.kv.holds.drop_branches() or self.kv.holds.empty_pins()):
                    continue  # nobody else is going to make room
                if not self.running or self.running[-1].priority <= request.priority:
                    return False
                victim = self.running.pop()
            self._preempt(victim)
        self.waiting.pop()
        insort(self.running, request, key=_urgency)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.since_step = step.step_id  # what is still on its way is drawn again
        request.num_prompt_logprobs = 0
        step.new_requests.append(request.to_worker())
        if request.copied_from:
            step.copied_blocks += (request.copied_from, request.block_ids[request.num_found_blocks])
        self._count_admission(request)
        return True

    def _count_admission(self, request: Request) -> None:
        counters = self._counters
        looks = self.kv.reads_cache(request) or request.num_computed_tokens
        num_queried = len(request.token_ids) if looks else 0
        if request.num_preemptions:
            counters.resume_queries += num_queried
            counters.resume_hits += request.num_computed_tokens
        else:
            counters.prefix_queries += num_queried
            counters.prefix_hits += request.num_computed_tokens
            request.num_cached_tokens = request.num_computed_tokens
            if request.num_computed_tokens:
                self._prefix_hits[request.request_id] = request.num_computed_tokens

    def _parked_victim(self) -> Request | None:
        """Return the least urgent parked request that holds a slot and blocks."""
        seated = [request for request in self.parked.values() if request.status is RequestStatus.RUNNING]
        return max(seated, key=_urgency, default=None)

    def _preempt(self, request: Request) -> None:
        """Send a request, taken from the running or parked, back to its place in the queue; it keeps its tokens.

        Those on their way too, if they arrive before it is admitted again.
        """
        assert request.since_step < self._step_id, "a request is preempted in the step that admits it"
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self._preempted[request.request_id] = request.num_preemptions
        if not request.parked:
            self.waiting.add(request)

    def _preempt_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._preempt(request)
        if requests:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    # ---------------------------------------------------------------------------------------------- what came of a step
    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Add the tokens that ``step`` sampled, end the requests that are done, and return what the front end gets."""
        step_id = step.step_id
        rows = self._step_to_rows.pop(step_id)
        result = EngineCoreOutputs()
        if output.failed or output.spoiled_slots:
            self._fail_rows(step, rows, output)
        if output.logprobs or output.prompt_logprobs:
            forward_logprobs(step, rows, output, result)
        ended: list[Request] = []
        num_dropped = 0
        add_request_id, add_token_id = result.request_ids.append, result.token_ids.append
        for request, token_id in zip(rows, output.token_ids, strict=True):
            if token_id < 0:
                continue  # not caught up
            if request.since_step > step_id:
                num_dropped += 1  # it ended or was admitted again while the step was out
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            add_request_id(request.request_id)
            add_token_id(token_id)
            if len(token_ids) >= request.check_from or token_id in request.stop_token_ids:
                ended += self._report_if_done(request, token_id)
        if step.draft_slots:
            self._take_drafts(step, rows, output, result, ended)
        self._end_all(ended)
        self.kv.step_ended(step_id)
        self._counters.num_dropped_tokens += num_dropped
        self._counters.num_generated_tokens += len(result.token_ids)
        result.finished, self._finished = self._finished, []
        if self._prefix_hits and result.token_ids:  # a message without tokens may go unsent
            result.num_cached_tokens, self._prefix_hits = self._prefix_hits, {}
        if self._preempted and result.token_ids:
            result.num_preemptions, self._preempted = self._preempted, {}
        result.stats = self.stats()
        return result

    def _take_drafts(
        self,
        step: SchedulerOutput,
        rows: list[Request],
        output: ModelRunnerOutput,
        result: EngineCoreOutputs,
        ended: list[Request],
    ) -> None:
        """Add the tokens that follow the first one in rows with drafts, until one of them ends its request."""
        slot_to_request = dict(zip(step.slots, rows, strict=True))
        for slot, drafts in zip(step.draft_slots, step.draft_token_ids, strict=True):
            request, more = slot_to_request[slot], output.more_token_ids.get(slot, ())
            lookup = request.lookup
            if request.since_step > step.step_id or lookup is None:
                continue
            num_taken = 0
            is_running = request.num_drafts_out > 0  # not preempted since
            for token_id in () if request in ended else more:
                num_taken += 1
                request.token_ids.append(token_id)
                result.request_ids.append(request.request_id)
                result.token_ids.append(token_id)
                if len(request.token_ids) >= request.check_from or token_id in request.stop_token_ids:
                    ended += (done := self._report_if_done(request, token_id))
                    if done:
                        break
            if is_running:
                request.num_computed_tokens += num_taken
                request.is_rewound = num_taken < len(drafts)
                request.num_drafts_out = 0
            lookup.learn(len(drafts), len(more), len(request.token_ids))
            lookup.num_proposed += len(drafts)
            lookup.num_accepted += num_taken
            self._counters.num_proposed_drafts += len(drafts)
            self._counters.num_accepted_drafts += num_taken
            result.drafts[request.request_id] = (lookup.num_proposed, lookup.num_accepted)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Return the ends of requests that no step has reported (refused, softly finished), ``None`` without any."""
        if not self._finished:
            return None
        finished, self._finished = self._finished, []
        return EngineCoreOutputs(finished=finished, stats=self.stats())

    def _report_if_done(self, request: Request, token_id: int) -> list[Request]:
        """Report the end of a request that its newest token completes, and return it."""
        end = end_of(request, token_id, self._eos_token_ids)
        if end is None:
            return []
        self._report(request, *end)
        return [request]

    def _fail_rows(self, step: SchedulerOutput, rows: list[Request], output: ModelRunnerOutput) -> None:
        """End the requests whose rows have no valid result, and start those anew that read what they computed.

        Those whose drafts may be the cause start anew too, and go on without.
        """
        slot_to_request = dict(zip(step.slots, rows, strict=True))
        ended: list[Request] = []
        invalid: set[int] = set()
        for slot in output.spoiled_slots:
            request = slot_to_request[slot]
            invalid |= self.kv.invalidate(request, step.step_id)
            if request.since_step <= step.step_id:
                request.lookup = None
        for slot, reason in output.failed.items():
            request = slot_to_request[slot]
            invalid |= self.kv.invalidate(request, step.step_id)
            if request.since_step <= step.step_id:
                message = f"the engine failed on this request: {reason}"
                error = describe(RequestFailedError(message, request_id=str(request.request_id)))
                self._report(request, EngineFinishReason.ERROR, error=error)
                ended.append(request)
        self._end_all(ended)
        self.kv.holds.drop_those_with(invalid)
        misled = self.kv.readers_of(invalid, self.requests.values())
        for request in misled:
            self.kv.invalidate(request)
        self._preempt_all([request for request in misled if request.status is RequestStatus.RUNNING])
        for request in misled:
            request.since_step = NEVER  # what it draws from that is dropped

    # ---------------------------------------------------------------------------------------------- the end of requests
    def _report(
        self, request: Request, reason: EngineFinishReason, stop_id: int | None = None, error: ErrorInfo | None = None
    ) -> None:
        num_cached, num_preemptions = request.num_cached_tokens, request.num_preemptions
        self._finished.append(FinishedRequest(request.request_id, reason, stop_id, num_cached, num_preemptions, error))

    def _end_all(self, ended: Sequence[Request]) -> None:
        """Forget live requests and free what they hold; O(ended), and once O(running) if any of them is."""
        was_running = False
        for request in ended:
            if request.status is RequestStatus.RUNNING:
                was_running = True
                self._release(request)
            else:
                self.kv.holds.drop_branch(request)
                if request.is_queued:
                    self.waiting.remove(request)
            if request.matcher is not None:
                request.matcher = None
                self._num_matchers -= 1
            request.status = RequestStatus.FINISHED
            request.since_step = NEVER
            del self.requests[request.request_id]
            self._num_lookups -= request.looks_up
            self.parked.pop(request.request_id, None)
        if was_running:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _release(self, request: Request) -> None:
        """Take back slot and blocks."""
        self.kv.free(request, self._step_id - 1 if self._step_to_rows else None)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
        request.border = 0
        request.num_drafts_out = 0
        request.is_rewound = False

    # ------------------------------------------------------------------------------------------------ looking at it all
    def has_unfinished(self) -> bool:
        """Return whether any request is live, parked ones included."""
        return bool(self.requests)

    def has_work(self) -> bool:
        """Return whether :meth:`schedule` (once no step is out) or :meth:`take_outputs` has something to give.

        Steps that are out are not counted: who launched them knows of them.
        """
        is_held = self.paused or self.asleep
        return bool(self._finished) or (not is_held and bool(self.running or self.waiting))

    def stats(self) -> SchedulerStats:
        """Return the present state and the counters since start, as a copy."""
        num_running = self._max_num_seqs - len(self._free_slots)
        return msgspec.structs.replace(
            self._counters,
            num_running=num_running,
            num_waiting=len(self.requests) - num_running,
            num_free_blocks=self.kv.pool.num_free_blocks + self.kv.num_leaving_blocks(),
            num_parked=len(self.parked),
            num_pinned_blocks=self.kv.holds.num_pinned_blocks,
            is_sleeping=self.asleep,
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; ``False``, and nothing done, while requests hold blocks.

        ``reset_running``: preempt those first; they go on later and compute everything again.
        """
        if reset_running:
            self._preempt_all([r for r in self.requests.values() if r.status is RequestStatus.RUNNING])
        if len(self._free_slots) < self._max_num_seqs:
            return False
        self.kv.holds.drop_branches()
        self.kv.holds.empty_pins()
        self.kv.reset_prefix_cache()
        return True

    def fall_asleep(self) -> None:
        """Schedule nothing until :attr:`asleep` is unset: the workers have forgotten all slots and blocks.

        :raises UsageError: a request still holds some; preempt first (:meth:`reset_prefix_cache`).
        """
        if not self.reset_prefix_cache():
            raise UsageError("requests hold slots and blocks of a scheduler that is to fall asleep")
        self._freed_slots.clear()
        self.asleep = True

    def check_integrity(self) -> None:
        """Verify that requests, slots and blocks agree; O(everything), for tests.

        :raises AssertionError: they do not.
        """
        seated = [request for request in self.requests.values() if request.status is RequestStatus.RUNNING]
        assert self.running == sorted((r for r in seated if not r.parked), key=_urgency), "the running are out of order"
        waiting = [request for request in self.requests.values() if request.status is RequestStatus.WAITING]
        queue = sorted((r for r in waiting if r.is_queued), key=_urgency)
        assert self._num_matchers == sum(request.matcher is not None for request in self.requests.values())
        assert (list(self.waiting), len(self.waiting)) == (queue, len(queue)), "the queue differs"
        assert len(seated) + len(waiting) == len(self.requests), "a finished request is still known"
        assert self.parked == {r.request_id: r for r in self.requests.values() if r.parked}
        slots = [request.slot for request in seated] + self._free_slots
        assert sorted(slots) == list(range(self._max_num_seqs)), "a slot is lost or has two owners"
        self.kv.check_integrity(self.requests.values())
        for request in self.requests.values():
            num_out = sum(request in rows for i, rows in self._step_to_rows.items() if i >= request.since_step)
            assert 0 <= request.num_tokens - len(request.token_ids) <= num_out
            assert request.num_computed_tokens < request.num_tokens <= request.max_num_tokens
            assert bool(request.block_ids) == (request.status is RequestStatus.RUNNING)


def _masks(rows: Sequence[Request]) -> dict[int, bytes]:
    """Return the masks of those ``rows`` of a step that draw a token under a grammar, by slot."""
    return {
        request.slot: request.matcher.mask
        for request in rows
        if request.matcher is not None and request.num_computed_tokens == len(request.token_ids)
    }
