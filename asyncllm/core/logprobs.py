"""Hand the logprobs of a step on to the front end: the worker keys them by slot, the front end knows only requests.

Invariant: each position is sent once, whatever is computed again after a preemption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.wire.messages import LogprobRows

if TYPE_CHECKING:
    from asyncllm.core.request import Request
    from asyncllm.wire.messages import EngineCoreOutputs
    from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["forward_logprobs"]


def forward_logprobs(
    step: SchedulerOutput, rows: list[Request], output: ModelRunnerOutput, result: EngineCoreOutputs
) -> None:
    """Add the logprobs of ``output`` to ``result``, without prompt positions that were sent before a preemption."""
    slot_to_request = {s: r for s, r in zip(step.slots, rows, strict=True) if r.since_step <= step.step_id}
    for slot in output.logprobs.keys() & slot_to_request.keys():
        result.logprobs[slot_to_request[slot].request_id] = output.logprobs[slot]
    for slot in output.prompt_logprobs.keys() & slot_to_request.keys():
        request, logprobs = slot_to_request[slot], output.prompt_logprobs[slot]
        num_known = request.num_prompt_logprobs_sent - request.num_prompt_logprobs
        request.num_prompt_logprobs += len(logprobs.token_ids) // logprobs.width
        if request.num_prompt_logprobs > request.num_prompt_logprobs_sent:
            request.num_prompt_logprobs_sent = request.num_prompt_logprobs
            result.prompt_logprobs[request.request_id] = _without_first(logprobs, num_known)


def _without_first(rows: LogprobRows, num_positions: int) -> LogprobRows:
    skip = num_positions * rows.width
    if not skip:
        return rows
    return LogprobRows(rows.width, rows.token_ids[skip:], rows.logprobs[skip:], rows.ranks[skip:])
