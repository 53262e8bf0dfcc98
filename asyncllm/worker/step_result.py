"""A step between its launch and its tokens: what was staged, what is drawn, and the copies on their way to the host.

Here alone numbers of the device become numbers of the host, and rows whose numbers are no numbers are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncllm.attention.base import FlatBatch
from asyncllm.sampling.columns import SamplingMetadata
from asyncllm.sampling.logprobs import LogprobTensors
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.token_mask import TokenMasks
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput
from asyncllm.worker.drafts import confirm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncllm.sampling.sampler import SamplerOutput
    from asyncllm.wire.messages import LogprobRows
    from asyncllm.worker.device_runtime import DeviceRuntime

__all__ = ["Draws", "PreparedStep", "PromptLogprobs", "StepResult"]

Int64 = npt.NDArray[np.int64]

NOT_FINITE = "its logits are not finite"
NOTHING_LEFT = (
    "no token is left to draw: allowed_token_ids, bad_words, logit_bias, min_tokens and the grammar, if there is one, "
    "exclude all"
)


@dataclass(slots=True)
class Draws:
    """What is drawn in a step: one token of a row, and one more after each of its drafts."""

    rows: Int64 | None  # [R] places among the rows of the step; None: one draw of each, in order
    is_batch: bool  # whether each token of the flat batch draws, in order
    metadata: SamplingMetadata
    history: TokenHistory
    masks: TokenMasks | None  # of rows under a grammar; None: there are none
    drafted: bool = False


@dataclass(slots=True)
class PreparedStep:
    """The flat batch of one step, staged."""

    slots: Int64  # [B]
    batch: FlatBatch
    plan: Any
    graph_size: int | None  # rows that the batch is padded to; None: it is run as it is
    draws: Draws | None  # None: nothing is drawn


@dataclass(slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt positions of one slot, on the device."""

    slot: int
    num_top: int
    parts: list[LogprobTensors]


class StepResult:
    """A launched step; :meth:`result` waits for it and may be called once.

    ``scrub(prepared, slots)`` makes blocks finite again that rows of the step have spoiled.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        scrub: Callable[[PreparedStep, Iterable[int]], None],
        step: SchedulerOutput,
        prepared: PreparedStep,
        sampled: SamplerOutput | None,
        prompt_logprobs: list[PromptLogprobs],
    ) -> None:
        self._scrub = scrub
        self._step = step
        self._prepared = prepared
        self._prompt_logprobs = prompt_logprobs
        self._logprobs = None if sampled is None else sampled.logprobs
        tensors = [] if sampled is None else [sampled.token_ids, sampled.best_logits]
        if self._logprobs is not None:
            tensors += self._logprobs.tensors()
        for prompt in prompt_logprobs:
            for part in prompt.parts:
                tensors += part.tensors()
        self._download = runtime.download(tensors) if tensors else None

    def result(self) -> ModelRunnerOutput:
        """Return the step's tokens; the one place where numbers come from the device."""
        output = ModelRunnerOutput(self._step.step_id, [])
        tensors = iter(self._download.wait() if self._download is not None else ())
        draws = self._prepared.draws
        if draws is None:
            output.token_ids = [-1] * len(self._step.slots)
        else:
            self._fill(output, draws, next(tensors).numpy(), next(tensors).numpy())
            if self._logprobs is not None:
                self._fill_logprobs(output, draws.metadata, self._logprobs.on_host(tensors))
        for prompt in self._prompt_logprobs:
            blocks = [part.on_host(tensors).to_block(prompt.num_top) for part in prompt.parts]
            output.prompt_logprobs[prompt.slot] = _join(blocks)
        return output

    def _fill(self, output: ModelRunnerOutput, draws: Draws, drawn: Int64, best: npt.NDArray[np.float32]) -> None:
        if draws.drafted:
            self._fill_drafted(output, draws, drawn, best)
            return
        finite = np.isfinite(best)
        if not finite.all():
            # Then all were excluded: the model itself gives some token a finite logit or a NaN.
            nothing_left, slots = best == -np.inf, draws.metadata.slots
            output.failed = dict.fromkeys(slots[~finite].tolist(), NOT_FINITE)
            output.failed |= dict.fromkeys(slots[nothing_left].tolist(), NOTHING_LEFT)
            self._scrub(self._prepared, slots[~(finite | nothing_left)].tolist())
            drawn = np.where(finite, drawn, -1)
        if draws.rows is not None:
            all_rows = np.full(len(self._step.slots), -1, np.int64)
            all_rows[draws.rows] = drawn
            drawn = all_rows
        output.token_ids = drawn.tolist()

    def _fill_drafted(
        self, output: ModelRunnerOutput, draws: Draws, drawn: Int64, best: npt.NDArray[np.float32]
    ) -> None:
        assert draws.rows is not None
        output.token_ids = [-1] * len(self._step.slots)
        not_finite: list[int] = []
        for found in confirm(self._step, draws.rows, drawn, best):
            if found.has_drafts:
                output.more_token_ids[found.slot] = found.token_ids[1:]
            if not found.is_finite:
                not_finite.append(found.slot)
            if found.token_ids:
                output.token_ids[found.row] = found.token_ids[0]
            elif found.is_finite:
                output.failed[found.slot] = NOTHING_LEFT
            elif found.has_drafts:  # a wrong one may be the cause, also before its place: zero times NaN is NaN
                output.spoiled_slots.append(found.slot)
            else:
                output.failed[found.slot] = NOT_FINITE
        self._scrub(self._prepared, not_finite)

    def _fill_logprobs(self, output: ModelRunnerOutput, metadata: SamplingMetadata, found: LogprobTensors) -> None:
        for slot, rows in zip(metadata.logprob_slots, found.to_rows(metadata.num_logprobs), strict=True):
            known = output.logprobs.setdefault(slot, rows)
            if known is not rows and len(known.ranks) < known.width * (1 + len(output.more_token_ids[slot])):
                _extend(known, rows)  # of the draws after a row's first one, those that count
        for slot in output.failed:
            output.logprobs.pop(slot, None)


def _join(blocks: list[LogprobRows]) -> LogprobRows:
    first = blocks[0]
    for block in blocks[1:]:
        _extend(first, block)
    return first


def _extend(rows: LogprobRows, more: LogprobRows) -> None:
    rows.token_ids += more.token_ids
    rows.logprobs += more.logprobs
    rows.ranks += more.ranks
