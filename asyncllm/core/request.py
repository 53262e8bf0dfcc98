"""A request as the scheduler sees it: its tokens, how far they are computed, and what it holds.

Not here: text, sampling state, anything of the worker. Plain mutable state, owned by the engine's busy-loop thread.

              admit: a slot, blocks for all its tokens
    WAITING ───────────────────────────────────────────► RUNNING ──────► FINISHED
       ▲  │                                              │     stop token, length, failed row,
       └──┼───── preempt: slot and blocks given back ────┘     abort, finish
          └────────────────────────────────────────────────────────────► FINISHED   (abort, finish)

``parked`` is a flag beside the status: a parked request stays where it is (a running one keeps its slot and blocks) but
takes part in nothing until it is unparked.

    token_ids   | prompt ............................ | output ............ |
                0          num_computed_tokens    num_prompt_tokens    num_tokens
                | KV exists or is being computed | to be scheduled          |

Invariant: ``0 <= num_computed_tokens <= num_tokens``; equal means that the next token is still on its way.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING

from asyncllm.errors import InvalidParameterError, PromptTooLongError, RequestError, RequestTooLargeError

if TYPE_CHECKING:
    from asyncllm.core.block_hash import BlockKey, ExtraKeys
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
    ``max_num_tokens`` bounds prompt plus output, ``stop_token_ids`` holds every id that ends it, EOS included.
    """

    __slots__ = (
        "block_ids",
        "block_keys",
        "border",
        "extra_keys",
        "max_num_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_logprobs_sent",
        "num_prompt_tokens",
        "num_tokens",
        "parent",
        "parked",
        "priority",
        "request_id",
        "sampling",
        "since_step",
        "slot",
        "status",
        "stop_token_ids",
        "token_ids",
        "urgency",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        *,
        priority: int,
        arrival: int,
        eos_token_ids: frozenset[int],
        max_num_tokens: int,
    ) -> None:
        sampling = message.sampling
        self.request_id = message.request_id
        self.sampling = sampling
        self.priority = priority
        self.urgency = (priority, arrival)

        self.token_ids = list(
            message.prompt_token_ids
        )  # a copy: it grows, and in-process the front end holds the original
        self.num_tokens = len(self.token_ids)  # kept beside the list: read by every step
        self.num_prompt_tokens = self.num_tokens
        self.num_computed_tokens = 0
        self.max_num_tokens = max_num_tokens
        eos = frozenset[int]() if sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = eos.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos

        self.status = RequestStatus.WAITING
        self.parked = False
        self.slot = -1  # row of the worker's batch while running
        self.since_step = NEVER  # results of earlier steps belong to a life before a preemption: dropped

        self.block_ids: list[int] = []
        self.border = 0  # up to this many tokens a step only counts; beyond, it needs a block. 0: still prefilling
        self.extra_keys: ExtraKeys = () if message.cache_salt is None else (("salt", message.cache_salt),)
        self.block_keys: list[BlockKey] = []  # of its first full blocks; computed once, kept over preemptions
        self.num_cached_blocks = 0  # leading blocks whose content the prefix cache was told of
        self.parent: ExtraKeys | int | None = self.extra_keys  # what the next of them follows (see block_pool)

        self.num_cached_tokens = 0  # prompt tokens that the first admission found in the prefix cache
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # prompt positions reported by the worker since admission …
        self.num_prompt_logprobs_sent = 0  # … and ever sent on: a preemption must not repeat them

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    def append_token(self, token_id: int) -> None:
        """Add a sampled token. (The scheduler's loop does the same inline.)"""
        self.token_ids.append(token_id)
        self.num_tokens += 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}{' parked' if self.parked else ''}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, {len(self.block_ids)} blocks, slot {self.slot})"
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
