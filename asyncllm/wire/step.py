"""What one step tells the worker and what comes back: only the *difference* to what the worker already holds.

The scheduler gives each running request a *slot*, a row of the worker's persistent batch, and keeps it until the
request is preempted or ends. A request's data crosses once (:class:`NewRequest`, again after a preemption); later
steps carry counters and new block ids as columns. The same structs serve in-process, between processes and over Ray.

The worker keeps ``num_computed_tokens`` and ``num_tokens`` per slot by the scheduler's own rule: a step computes
``num_scheduled_tokens`` more, and a row whose computed tokens reach its known tokens draws one token and appends it.

*Drafts* are guesses at a row's next tokens, computed in the same step. The row then draws after its newest token and
after each draft, each time as it would have drawn there without drafts; what it drew after a draft counts while all
drafts up to there are what was drawn. The scheduler leaves such a row alone until it knows the result:

    known   n │ drafts  g1 g2 g3        drawn  g1 g2 x y   →   g1 g2 x are new tokens, g3 was wrong, y is nothing
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
    ``copied_blocks``, ``rewound_slots``, ``draft_slots``, the forward.
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
    draft_slots: list[int] = []  # rows with drafts …
    draft_token_ids: list[list[int]] = []  # … and which; ``num_scheduled_tokens`` counts them
    rewound_slots: list[int] = []  # rows of which not all drafts counted …
    rewound_num_computed: list[int] = []  # … and how many computed tokens they have: one less than known ones


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """``token_ids[i]`` is the token drawn for ``SchedulerOutput.slots[i]``, -1 where its prefill is not complete.

    ``logprobs`` and ``prompt_logprobs`` are keyed by slot, only for rows that asked; the former holds as many positions
    as the row has new tokens. ``failed`` maps a slot to the
    reason why that row alone has no valid token (its logits are not finite).
    """

    step_id: int
    token_ids: list[int]
    logprobs: dict[int, LogprobRows] = {}
    prompt_logprobs: dict[int, LogprobRows] = {}
    failed: dict[int, str] = {}
    more_token_ids: dict[int, list[int]] = {}  # by slot, of rows with drafts: the tokens that follow the first one
    spoiled_slots: list[int] = []  # rows whose drafts may have led to numbers that are none: to be computed without
