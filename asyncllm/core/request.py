"""A request as the scheduler sees it: its tokens, how far they are computed, and what it holds.

Not here: text, sampling state, anything of the worker. Plain mutable state, owned by the engine's busy-loop thread.

               admit: slot, blocks
    WAITING ◄──────────────────────► RUNNING ──── stop, length, failed row ───┐
       │    preempt: both taken back    │                                     ▼
       └────────── abort, finish ───────┴──────── abort, finish ────────► FINISHED

``parked`` is a flag beside it: a parked request keeps its status, and a running one its slot and blocks, but it is out
of the queue and of all steps until it is unparked. ``waits_for_grammar`` is another: until the grammar is compiled, the
request is WAITING but in no queue.

    0                  num_prompt_tokens      len(token_ids)    num_tokens
    ├──────── prompt ──────────┼────── output ──────┼─ on its way ──┤
    ├──── computed, or in a scheduled step ────┼─────── to come ────┤
    0                                 num_computed_tokens

A token is *on its way* once the step that draws it is scheduled: the worker has it before its id is known here, so the
next step can compute with it. Invariant: ``0 <= num_computed_tokens < num_tokens``; a request that has caught up is
exactly one token behind. One that *needs its token* is never computed with a token on its way: what may follow it is
known only once its id is. Drafts (:mod:`asyncllm.wire.step`) are none of its tokens, and not computed, before the step
that tries them has ended; until then ``num_drafts_out`` keeps it out of steps.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING

from msgspec.structs import replace

from asyncllm.core.block_hash import extra_keys
from asyncllm.core.prompt_lookup import PromptLookup
from asyncllm.core.repetition import RepetitionWatch
from asyncllm.errors import InvalidParameterError, PromptTooLongError, RequestError, RequestTooLargeError
from asyncllm.wire.step import NewRequest

if TYPE_CHECKING:
    from asyncllm.core.block_hash import BlockKey, ExtraKeys
    from asyncllm.structured.matcher import Matcher
    from asyncllm.wire.messages import EngineCoreRequest

__all__ = ["NEVER", "Request", "RequestStatus", "why_refused"]

NEVER = sys.maxsize
"""A step id that is never reached."""


class RequestStatus(enum.Enum):
    """Where a request is; see the drawing above."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """One sample being generated.

    ``urgency`` is the total order of all requests: priority class, then arrival; the smallest is served first.
    ``max_num_tokens`` bounds prompt plus output, ``stop_token_ids`` holds every id that ends it, EOS included. With
    ``check_from`` tokens or more, each new one may end it; with fewer only one of those ids.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "border",
        "cache_parent",
        "check_from",
        "copied_from",
        "extra_keys",
        "is_rewound",
        "lookup",
        "matcher",
        "max_num_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_out",
        "num_found_blocks",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "parked",
        "prefix_id",
        "priority",
        "repetition",
        "request_id",
        "sampling",
        "since_step",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "urgency",
        "waits_for_grammar",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        *,
        priority: int,
        arrival: int,
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        sampling = message.sampling
        self.request_id = message.request_id
        self.sampling = sampling
        self.priority = priority
        self.urgency = (priority, arrival)

        self.token_ids = list(message.prompt_token_ids)  # a copy: it grows, and the front end may hold the original
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = min(self.num_prompt_tokens + sampling.max_tokens, max_num_tokens)
        eos = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = eos.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos
        watched = None if sampling.rare is None else sampling.rare.repetition
        self.repetition = None if watched is None else RepetitionWatch(*watched, start=self.num_prompt_tokens)
        self.waits_for_grammar = sampling.grammar is not None
        self.matcher: Matcher | None = None  # where the known output stands in the grammar; outlives preemptions
        self.check_from = self.max_num_tokens if watched is None and not self.waits_for_grammar else 0
        num_drafts = 0 if sampling.rare is None or self.waits_for_grammar else sampling.rare.num_lookup_tokens
        self.lookup = PromptLookup(num_drafts) if num_drafts else None
        self.num_drafts_out = 0  # in a step whose result is not known
        self.is_rewound = False  # fewer tokens count as computed than the worker believes

        self.status = RequestStatus.WAITING
        self.parked = False
        self.slot = -1  # row of the worker's batch while running
        self.since_step = NEVER  # its last admission; results of earlier steps are dropped

        self.block_ids: list[int] = []
        self.border = 0  # with fewer tokens computed a step only counts on: no new block, no end; 0: not caught up yet
        self.extra_keys: ExtraKeys = extra_keys(message.cache_salt)
        self.block_keys: list[BlockKey] = []  # of its first full blocks; computed once, kept over preemptions
        self.num_found_blocks = 0  # leading blocks that the last admission found in the cache
        self.num_cached_blocks = 0  # leading blocks that the prefix cache was told of
        self.cache_parent: ExtraKeys | int | None = self.extra_keys  # what the next of them follows; see CachedBlock

        self.copied_from = 0  # block whose begin the last admission copied, behind what it found; 0: none
        self.prefix_id = message.prefix_id  # the request or pin that it shares its begin with

        self.num_cached_tokens = 0  # prompt tokens that the first admission found in the prefix cache
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # prompt positions that the worker reported since admission …
        self.num_prompt_logprobs_sent = 0  # … and those sent on ever: a preemption must not repeat them

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, those on their way included."""
        return self.num_computed_tokens + 1 if self.border else len(self.token_ids)

    @property
    def looks_up(self) -> bool:
        """Return whether it asked for drafts, even if it gets none any more."""
        return self.sampling.rare is not None and self.sampling.rare.num_lookup_tokens > 0

    @property
    def num_output_tokens(self) -> int:
        """Return the number of generated tokens whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_its_token(self) -> bool:
        """Return whether no step may compute with a token of it before the id is known."""
        return self.matcher is not None

    @property
    def is_queued(self) -> bool:
        """Return whether the request stands in the queue while it is WAITING."""
        return not (self.parked or self.waits_for_grammar)

    def set_border(self, num_tokens: int) -> None:
        """Let steps only count on below so many computed tokens, for which there are blocks.

        With a grammar or a lookup no step only counts on.
        """
        if self.matcher is not None or self.lookup is not None:
            self.border = 1  # it is looked at in every step
            return
        self.border = num_tokens if num_tokens < self.max_num_tokens else self.max_num_tokens - 1

    def to_worker(self) -> NewRequest:
        """Return what the worker has to know of a request that was just admitted; it shares nothing with this."""
        sampling = self.sampling
        if sampling.rare is not None and sampling.rare.grammar is not None:  # a text as long as the caller likes
            sampling = replace(sampling, rare=replace(sampling.rare, grammar=None))
        return NewRequest(
            self.slot,
            self.request_id,
            self.token_ids.copy(),
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.block_ids.copy(),
            sampling,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}{' parked' if self.parked else ''}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, {self.num_tokens - len(self.token_ids)} on "
            f"their way, {len(self.block_ids)} blocks, slot {self.slot})"
        )


def why_refused(
    message: EngineCoreRequest, *, max_model_len: int, num_blocks: int, block_size: int
) -> RequestError | None:
    """Return why a request could not make one token even with the engine to itself; ``None`` if it could."""
    num_tokens = len(message.prompt_token_ids)
    num_blocks_needed = -(-num_tokens // block_size)
    if not num_tokens:
        kind, limit, reason = InvalidParameterError, 1, "the prompt is empty"
    elif num_tokens >= max_model_len:
        kind, limit = PromptTooLongError, max_model_len - 1
        reason = f"the prompt has {num_tokens} tokens; with one output token it must fit max_model_len {max_model_len}"
    elif num_blocks_needed > num_blocks:
        kind, limit = RequestTooLargeError, num_blocks * block_size
        reason = (
            f"the prompt of {num_tokens} tokens needs {num_blocks_needed} KV blocks of {block_size} tokens; "
            f"the engine has {num_blocks} ({limit} tokens)"
        )
    else:
        return None
    return kind(reason, parameter="prompt", value=num_tokens, limit=limit, request_id=str(message.request_id))
