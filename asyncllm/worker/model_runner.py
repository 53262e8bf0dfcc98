"""One step of the model: difference in, tokens out.

    apply    the step's difference to the persistent batch
    prepare  one flat batch of new tokens with vectorised numpy into persistent buffers: ids, positions, KV slots
    forward  the model over the flat batch
    sample   logits of the rows that reach their known tokens; the drawn tokens stay on the device and are appended to
             the batch there, so that the next step can be launched before they have reached the host
    result   tokens as a list

Between prepare and result the host reads nothing that the device computed: every length comes from the scheduler.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.attention.base import AttentionBackend, FlatBatch, KVCache
from asyncllm.models.base import ForwardContext, StepModel
from asyncllm.sampling.logprobs import LogprobTensors, compute_logprobs
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.sampler import Sampler, SamplerOutput
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput
from asyncllm.worker.input_batch import InputBatch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.sampling.columns import SamplingMetadata
    from asyncllm.wire.messages import LogprobRows

__all__ = ["ModelRunner", "StepResult"]

Int64 = npt.NDArray[np.int64]

NOT_FINITE = "its logits are not finite"
NOTHING_LEFT = "no token is left to draw: allowed_token_ids, bad_words, logit_bias and min_tokens exclude all"
PROMPT_LOGPROB_ELEMENTS = 1 << 22  # logits of a prompt that exist at once: 16 MiB


@dataclass(slots=True)
class PreparedStep:
    """The flat batch of one step."""

    slots: Int64  # [B]
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    batch: FlatBatch
    sample_rows: Int64 | None  # rows that draw a token; None: all
    last_tokens: torch.Tensor | None  # place of the last token of each row that draws; None: the batch is all of them


@dataclass(slots=True)
class PromptLogprobs:
    """Logprobs of consecutive prompt positions of one slot, on the device."""

    slot: int
    num_top: int
    parts: list[LogprobTensors]


class StepResult:
    """A launched step; :meth:`result` waits for it and may be called once."""

    def __init__(
        self,
        runner: ModelRunner,
        step: SchedulerOutput,
        prepared: PreparedStep,
        sampled: SamplerOutput | None,
        metadata: SamplingMetadata | None,
        prompt_logprobs: list[PromptLogprobs],
    ) -> None:
        self._runner = runner
        self._step = step
        self._prepared = prepared
        self._sampled = sampled
        self._metadata = metadata
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> ModelRunnerOutput:
        """Return the step's tokens; the one place where numbers come from the device."""
        output = ModelRunnerOutput(self._step.step_id, [])
        if self._sampled is None or self._metadata is None:
            output.token_ids = [-1] * len(self._step.slots)
        else:
            self._fill(output, self._sampled, self._metadata)
        for prompt in self._prompt_logprobs:
            output.prompt_logprobs[prompt.slot] = _join([part.to_block(prompt.num_top) for part in prompt.parts])
        return output

    def _fill(self, output: ModelRunnerOutput, sampled: SamplerOutput, metadata: SamplingMetadata) -> None:
        drawn, rows = sampled.token_ids.cpu().numpy(), self._prepared.sample_rows
        best = sampled.best_logits.cpu().numpy()
        finite = np.isfinite(best)
        if not finite.all():
            # Then all were excluded: the model itself gives some token a finite logit or a NaN.
            nothing_left = best == -np.inf
            output.failed = dict.fromkeys(metadata.slots[~finite].tolist(), NOT_FINITE)
            output.failed |= dict.fromkeys(metadata.slots[nothing_left].tolist(), NOTHING_LEFT)
            self._runner.scrub(self._prepared, metadata.slots[~(finite | nothing_left)].tolist())
            drawn = np.where(finite, drawn, -1)
        if rows is not None:
            all_rows = np.full(len(self._step.slots), -1, np.int64)
            all_rows[rows] = drawn
            drawn = all_rows
        output.token_ids = drawn.tolist()
        if sampled.logprobs is not None:
            found = sampled.logprobs.to_rows(metadata.num_logprobs)
            output.logprobs = dict(zip(metadata.logprob_slots, found, strict=True))
            for slot in output.failed:
                output.logprobs.pop(slot, None)


class ModelRunner:
    """Runs steps of one model on one device; used by the worker's thread only."""

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        kv_caches: list[KVCache],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        spec = backend.spec
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.vocab_size = vocab_size
        self.device = spec.device
        self.batch = InputBatch(
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            device=spec.device,
        )
        self.sampler = Sampler(spec.kernels)
        self._metadata: SamplingMetadata | None = None
        self._metadata_version = -1
        self._flat_tokens = self.batch.tokens.view(-1)
        # Persistent buffers: numpy writes them, torch sees the same memory.
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._kv_slots = np.zeros(max_num_batched_tokens, np.int64)
        self._places = np.zeros(max_num_batched_tokens, np.int64)
        self._query_start = np.zeros(max_num_seqs + 1, np.int32)
        self._arange = np.arange(max(max_num_batched_tokens, max_num_seqs + 1))
        self._positions_tensor = torch.from_numpy(self._positions)
        self._places_tensor = torch.from_numpy(self._places)

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Launch ``step`` and return its pending result.

        :raises RuntimeError: the model or the backend failed; the batch is then not to be used again.
        """
        with torch.inference_mode():
            self.batch.apply(step)
            prepared = self.prepare(step)
            hidden = self.forward(prepared)
            prompt_logprobs = self._prompt_logprobs(prepared, hidden) if self.batch.slot_to_prompt_logprobs else []
            sampled, metadata = self._sample(prepared, hidden)
            return StepResult(self, step, prepared, sampled, metadata, prompt_logprobs)

    def prepare(self, step: SchedulerOutput) -> PreparedStep:
        """Return the flat batch of ``step`` and count its tokens as computed."""
        batch, num_rows, num_tokens = self.batch, len(step.slots), step.total_num_tokens
        slots = np.array(step.slots, np.int64)
        query_lens = np.array(step.num_scheduled_tokens, np.int64)
        computed = batch.num_computed_tokens[slots]
        seq_lens = computed + query_lens
        positions, places = self._positions[:num_tokens], self._places[:num_tokens]
        query_start = self._query_start[: num_rows + 1]
        if num_tokens == num_rows:
            token_slots = slots
            positions[:] = computed
            query_start[:] = self._arange[: num_rows + 1]
        else:
            token_slots = np.repeat(slots, query_lens)
            np.cumsum(query_lens, out=query_start[1:])
            np.subtract(self._arange[:num_tokens], np.repeat(query_start[:-1] - computed, query_lens), out=positions)
        np.multiply(token_slots, batch.max_tokens, out=places)
        places += positions
        batch.block_table.kv_slots(token_slots, positions, self._kv_slots[:num_tokens])
        batch.num_computed_tokens[slots] = seq_lens
        draws = seq_lens == batch.num_tokens[slots]
        sample_rows = None if draws.all() else np.flatnonzero(draws)
        if num_tokens == num_rows and sample_rows is None:
            last_tokens = None
        else:
            last = query_start[1:] - 1 if sample_rows is None else query_start[1:][sample_rows] - 1
            last_tokens = torch.from_numpy(last).to(self.device)
        return PreparedStep(
            slots,
            self._flat_tokens.index_select(0, self._places_tensor[:num_tokens].to(self.device)),
            self._positions_tensor[:num_tokens].to(self.device),
            FlatBatch(
                query_lens=query_lens.astype(np.int32),
                seq_lens=seq_lens.astype(np.int32),
                query_start=query_start,
                block_table=batch.block_table.rows(slots),
                slot_mapping=self._kv_slots[:num_tokens],
                positions=positions,
            ),
            sample_rows,
            last_tokens,
        )

    def forward(self, prepared: PreparedStep) -> torch.Tensor:
        """Return the final hidden states [T, hidden] of the flat batch; its keys and values are in the cache then."""
        context = ForwardContext(backend=self.backend, plan=self.backend.plan(prepared.batch), kv_caches=self.kv_caches)
        return self.model(prepared.token_ids, prepared.positions, context)

    def scrub(self, prepared: PreparedStep, slots: Iterable[int]) -> None:
        """Make the KV blocks that ``slots`` had in this step finite again, for the blocks' next owners."""
        rows = np.isin(prepared.slots, list(slots))
        blocks = np.unique(prepared.batch.block_table[rows])
        self.backend.scrub(self.kv_caches, blocks[blocks > 0].tolist())

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(hidden)
        # Rows of the head beyond the vocabulary are padding: nobody trained them.
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]

    def _sample(
        self, prepared: PreparedStep, hidden: torch.Tensor
    ) -> tuple[SamplerOutput | None, SamplingMetadata | None]:
        batch, rows = self.batch, prepared.sample_rows
        slots = prepared.slots if rows is None else prepared.slots[rows]
        if not len(slots):
            return None, None
        if prepared.last_tokens is not None:
            hidden = hidden.index_select(0, prepared.last_tokens)
        metadata = self._metadata_of(slots)
        num_tokens = batch.num_tokens[slots]
        history = TokenHistory(batch.tokens, slots, batch.num_prompt_tokens[slots], num_tokens)
        sampled = self._greedy(hidden) if metadata.only_greedy else None
        if sampled is None:
            sampled = self.sampler.sample(self._logits(hidden), metadata, history)
        places = torch.from_numpy(slots * batch.max_tokens + num_tokens).to(self.device)
        self._flat_tokens.index_copy_(0, places, sampled.token_ids)
        batch.num_tokens[slots] = num_tokens + 1
        return sampled, metadata

    def _greedy(self, hidden: torch.Tensor) -> SamplerOutput | None:
        """Return the most likely tokens without logits of the whole vocabulary, where the model can."""
        drawn = self.model.greedy_tokens(hidden, self.vocab_size)
        return None if drawn is None else SamplerOutput(*drawn, logprobs=None)

    def _metadata_of(self, slots: Int64) -> SamplingMetadata:
        """Return the sampling metadata of ``slots``: the last one while the same requests sample in the same order."""
        metadata = self._metadata
        if (
            metadata is None
            or self._metadata_version != self.batch.version
            or not np.array_equal(metadata.slots, slots)
        ):
            metadata = self._metadata = self.batch.sampling.select(slots)
            self._metadata_version = self.batch.version
        return metadata

    def _prompt_logprobs(self, prepared: PreparedStep, hidden: torch.Tensor) -> list[PromptLogprobs]:
        """Return the logprobs of the prompt tokens that follow this step's prompt positions, where they are wanted."""
        batch, flat = self.batch, prepared.batch
        found: list[PromptLogprobs] = []
        for row, slot in enumerate(prepared.slots.tolist()):
            num_top = batch.slot_to_prompt_logprobs.get(slot)
            if num_top is None:
                continue
            first, end = int(flat.seq_lens[row] - flat.query_lens[row]), int(flat.seq_lens[row])
            end = min(end, int(batch.num_prompt_tokens[slot]) - 1)  # the last prompt position predicts the first output
            if first >= end:
                continue
            start = int(flat.query_start[row])
            parts: list[LogprobTensors] = []
            size = max(1, PROMPT_LOGPROB_ELEMENTS // self.vocab_size)
            for begin in range(first, end, size):
                stop = min(begin + size, end)
                logits = self._logits(hidden[start + begin - first : start + stop - first])
                chosen = batch.tokens[slot, begin + 1 : stop + 1]
                parts.append(compute_logprobs(logits, chosen, with_top=num_top > 0))
            found.append(PromptLogprobs(slot, min(num_top, self.vocab_size), parts))
        return found


def _join(blocks: list[LogprobRows]) -> LogprobRows:
    first = blocks[0]
    for block in blocks[1:]:
        first.token_ids += block.token_ids
        first.logprobs += block.logprobs
        first.ranks += block.ranks
    return first
