"""What one step tells the worker and what comes back: only the *difference* to what the worker already holds.

The scheduler gives each running request a *slot*, a row of the worker's persistent batch, and keeps it until the
request is preempted or ends. A request's data crosses once (:class:`NewRequest`, again after a preemption); later
steps carry counters and new block ids as columns. The same structs serve in-process, between processes and over Ray.

The worker keeps ``num_computed_tokens`` and ``num_tokens`` per slot by the scheduler's own rule: a step computes
``num_scheduled_tokens`` more, and a row whose computed tokens reach its known tokens draws one token and appends it.
"""

from __future__ import annotations

import msgspec

from asyncllm.wire.messages import EngineSampling, LogprobRows

__all__ = ["ModelRunnerOutput", "NewRequest", "SchedulerOutput"]


class NewRequest(msgspec.Struct, array_like=True, gc=False):
    """A request that takes a slot. ``token_ids``: the prompt, then what was generated before a preemption."""

    slot: int
    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose KV is in ``block_ids`` already: the prefix-cache hit
    block_ids: list[int]
    sampling: EngineSampling


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step: rows ``slots[i]`` compute ``num_scheduled_tokens[i]`` tokens each.

    Applied by the worker in this order: ``freed_slots``, ``new_requests``, ``block_slots``/``block_ids``,
    ``copied_blocks``, the forward.
    """

    step_id: int
    slots: list[int]
    num_scheduled_tokens: list[int]
    total_num_tokens: int
    new_requests: list[NewRequest] = []
    block_slots: list[int] = []  # rows that got more blocks …
    block_ids: list[list[int]] = []  # … and which, appended to the row's table
    freed_slots: list[int] = []  # requests that ended or were preempted since the last step
    copied_blocks: list[int] = []  # pairs, from and to: all are read before any is written; see AttentionBackend
    masks: dict[int, bytes] = {}  # by slot, of rows that draw under a grammar: bit i (of byte i // 8) allows token i


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """``token_ids[i]`` is the token drawn for ``SchedulerOutput.slots[i]``, -1 where its prefill is not complete.

    ``logprobs`` and ``prompt_logprobs`` are keyed by slot, only for rows that asked. ``failed`` maps a slot to the
    reason why that row alone has no valid token (its logits are not finite).
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = {}
    prompt_logprobs: dict[int, LogprobRows] = {}
    failed: dict[int, str] = {}
