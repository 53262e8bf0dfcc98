"""One step of the model: difference in, tokens out.

    apply    the step's difference to the persistent batch
    prepare  one flat batch of new tokens with vectorised numpy into the staged buffers: ids, positions, KV slots
    copy     what was staged to the device, at once (on a CPU it is there)
    forward  the model over the flat batch, as a recorded graph where there is one
    sample   logits of the rows that reach their known tokens; the drawn tokens stay on the device and are appended to
             the batch there, so that the next step can be launched before they have reached the host
    result   tokens as a list, by a copy that was queued with the step

Between prepare and result the host reads nothing that the device computed: every length comes from the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.attention.base import (
    AttentionBackend,
    DeviceBatch,
    FlatBatch,
    GraphSupport,
    KVCache,
    StepField,
    StepLimits,
)
from asyncllm.models.base import ForwardContext, StepModel
from asyncllm.sampling.device_draw import make_device_draw
from asyncllm.sampling.logprobs import LogprobTensors, compute_logprobs
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.rng import uniforms
from asyncllm.sampling.sampler import Sampler, SamplerOutput
from asyncllm.sampling.token_mask import TokenMasks
from asyncllm.worker.cuda_graphs import DecodeGraphs
from asyncllm.worker.drafts import spread
from asyncllm.worker.input_batch import InputBatch
from asyncllm.worker.step_buffers import StepBuffers
from asyncllm.worker.step_result import Draws, PreparedStep, PromptLogprobs, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncllm.sampling.columns import SamplingMetadata
    from asyncllm.wire.step import SchedulerOutput
    from asyncllm.worker.device_runtime import DeviceRuntime

__all__ = ["ModelRunner"]

Int64 = npt.NDArray[np.int64]

PROMPT_LOGPROB_ELEMENTS = 1 << 22  # logits of a prompt that exist at once: 16 MiB
NO_BLOCKS = np.zeros((0, 0), np.int32)  # device code reads the block tables of all slots


class ModelRunner:
    """Runs steps of one model on one device; used by the worker's thread only.

    ``graph_sizes``: numbers of rows whose decode steps :meth:`capture_graphs` records, none larger than a step can be;
    none where the device or the backend has no use for them.
    """

    def __init__(
        self,
        model: StepModel,
        backend: AttentionBackend,
        kv_caches: list[KVCache],
        runtime: DeviceRuntime,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        graph_sizes: Sequence[int] = (),
    ) -> None:
        # A larger graph would read and write beyond the ends of its inputs.
        assert max(graph_sizes, default=0) <= min(max_num_seqs, max_num_batched_tokens), graph_sizes
        spec = backend.spec
        self.model = model
        self.backend = backend
        self.kv_caches = kv_caches
        self.runtime = runtime
        self.vocab_size = vocab_size
        self.batch = InputBatch(
            runtime,
            num_slots=max_num_seqs,
            max_model_len=max_model_len,
            block_size=spec.block_size,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
        )
        limits = StepLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len
        )
        fields = backend.step_fields(limits)
        self._backend_fields = [field.name for field in fields]
        self._buffers = StepBuffers(runtime, [*_own_fields(limits, spec.block_size), *fields])
        self._inputs = self._buffers.device
        self.graphs = DecodeGraphs(runtime, list(graph_sizes) if backend.graphs is not GraphSupport.NONE else [])
        self.sampler = Sampler(spec.kernels, make_device_draw(spec.device, runtime.upload))
        self._stages_uniforms = spec.kernels is None  # kernels that draw make their own
        self._metadata: SamplingMetadata | None = None
        self._metadata_version = -1
        self._flat_tokens = self.batch.tokens.view(-1)
        self._flat_blocks = self.batch.block_tables.view(-1)
        self._arange = np.arange(max(max_num_batched_tokens, max_num_seqs + 1))

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Launch ``step`` and return its pending result.

        :raises RuntimeError: the model or the backend failed; the batch is then not to be used again.
        """
        with torch.inference_mode(), self.runtime.current():
            self.batch.apply(step)
            prepared = self.prepare(step)
            self._buffers.commit()
            if not self.runtime.shares_memory:
                self._grow_block_tables()
            if step.copied_blocks:
                self._copy_blocks(step.copied_blocks)
            hidden = self.forward(prepared)
            prompt_logprobs = self._prompt_logprobs(prepared, hidden) if self.batch.slot_to_prompt_logprobs else []
            sampled = self._sample(prepared, hidden)
            return StepResult(self.runtime, self.scrub, step, prepared, sampled, prompt_logprobs)

    def prepare(self, step: SchedulerOutput) -> PreparedStep:
        """Stage the flat batch of ``step`` and count its tokens as computed."""
        batch, num_rows, num_tokens = self.batch, len(step.slots), step.total_num_tokens
        staged = self._buffers.begin()
        slots = np.array(step.slots, np.int64)
        query_lens = np.array(step.num_scheduled_tokens, np.int64)
        computed = batch.num_computed_tokens[slots]
        seq_lens = computed + query_lens
        positions, places = staged["positions"][:num_tokens], staged["token_places"][:num_tokens]
        query_start = staged["query_start"][: num_rows + 1]
        if num_tokens == num_rows:
            token_slots = slots
            positions[:] = computed
            query_start[:] = self._arange[: num_rows + 1]
        else:
            token_slots = np.repeat(slots, query_lens)
            query_start[0] = 0
            np.cumsum(query_lens, out=query_start[1:])
            np.subtract(self._arange[:num_tokens], np.repeat(query_start[:-1] - computed, query_lens), out=positions)
        np.multiply(token_slots, batch.max_tokens, out=places)
        places += positions
        batch.block_table.kv_slots(token_slots, positions, staged["slot_mapping"][:num_tokens])
        batch.num_computed_tokens[slots] = seq_lens
        if step.draft_slots:
            draws = self._stage_drafted_draws(staged, step, slots, seq_lens, query_start)
        else:
            draws = self._stage_draws(staged, slots, seq_lens, query_start, step.masks)
        graph_size = self.graphs.size_for(num_rows) if num_tokens == num_rows else None
        flat = FlatBatch(
            query_lens=query_lens.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_start=query_start,
            block_table=NO_BLOCKS if self.backend.needs_device_batch else batch.block_table.rows(slots),
            slot_mapping=staged["slot_mapping"][:num_tokens],
            positions=positions,
        )
        if self.backend.needs_device_batch:
            self._stage_for_device(staged, flat, slots, graph_size)
        return PreparedStep(slots, flat, self.backend.plan(flat), graph_size, draws)

    def forward(self, prepared: PreparedStep) -> torch.Tensor:
        """Return the final hidden states [T, hidden] of the flat batch; its keys and values are in the cache then.

        Those of a graph are valid until the next one is replayed.
        """
        num_tokens = len(prepared.batch.positions)
        if prepared.graph_size is not None:
            return self.graphs.replay(prepared.graph_size)[:num_tokens]
        return self._forward(num_tokens, prepared.plan)

    def _copy_blocks(self, pairs: list[int]) -> None:
        sources, targets = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
        self.backend.copy_blocks(self.kv_caches, self.runtime.upload(sources), self.runtime.upload(targets))

    def capture_graphs(self, report: Callable[[float], None] = lambda fraction: None) -> None:
        """Record the decode step of each of the sizes, and ``report`` the share that is done."""
        with torch.inference_mode(), self.runtime.current():
            self.graphs.capture(self._decode_work, report)

    def scrub(self, prepared: PreparedStep, slots: Iterable[int]) -> None:
        """Make the KV blocks that ``slots`` had in this step finite again, for the blocks' next owners."""
        if self.backend.needs_device_batch:
            return  # such backends never read past the end of a row
        rows = np.isin(prepared.slots, list(slots))
        blocks = np.unique(prepared.batch.block_table[rows])
        self.backend.scrub(self.kv_caches, blocks[blocks > 0].tolist())

    # ----------------------------------------------------------------------------------------------------- preparation
    def _stage_draws(
        self,
        staged: Mapping[str, npt.NDArray[Any]],
        slots: Int64,
        seq_lens: Int64,
        query_start: npt.NDArray[np.int32],
        slot_to_mask: Mapping[int, bytes],
    ) -> Draws | None:
        """Stage which rows draw a token, where each finds its last one and where the new one goes; count it."""
        batch = self.batch
        draws = seq_lens == batch.num_tokens[slots]
        rows = None if draws.all() else np.flatnonzero(draws)
        ends = query_start[1:]
        if rows is not None:
            if not len(rows):
                return None
            slots, seq_lens, ends = slots[rows], seq_lens[rows], ends[rows]
        count = len(slots)
        is_batch = rows is None and query_start[-1] == count
        if not is_batch:
            np.subtract(ends, 1, out=staged["last_tokens"][:count])
        np.add(slots * batch.max_tokens, seq_lens, out=staged["drawn_places"][:count])
        batch.num_tokens[slots] = seq_lens + 1
        metadata = self._metadata_of(slots)
        history = self._stage_history(staged, metadata, seq_lens)
        return Draws(rows, is_batch, metadata, history, self._masks_of(slots, slot_to_mask))

    def _stage_drafted_draws(
        self,
        staged: Mapping[str, npt.NDArray[Any]],
        step: SchedulerOutput,
        slots: Int64,
        seq_lens: Int64,
        query_start: npt.NDArray[np.int32],
    ) -> Draws:
        """As :meth:`_stage_draws`, with a draw after each draft, from the tokens up to there."""
        batch = self.batch
        has_caught_up = seq_lens == batch.num_tokens[slots]
        batch.num_tokens[slots[has_caught_up]] = seq_lens[has_caught_up] + 1
        rows, num_before, flat_places = spread(step, has_caught_up, seq_lens, query_start[1:].astype(np.int64))
        slots, count = slots[rows], len(rows)
        staged["last_tokens"][:count] = flat_places
        np.add(slots * batch.max_tokens, num_before, out=staged["drawn_places"][:count])
        metadata = self._metadata_of(slots)
        history = self._stage_history(staged, metadata, num_before)
        masks = self._masks_of(slots, step.masks)
        return Draws(rows, bool(count == query_start[-1]), metadata, history, masks, drafted=True)

    def _stage_history(
        self, staged: Mapping[str, npt.NDArray[Any]], metadata: SamplingMetadata, seq_lens: Int64
    ) -> TokenHistory:
        """Return what each draw has before it, and stage the number at which it draws."""
        slots, count = metadata.slots, len(metadata.slots)
        history = TokenHistory(self.batch.tokens, slots, self.batch.num_prompt_tokens[slots], seq_lens)
        if self._stages_uniforms and not metadata.all_greedy:
            parameters = metadata.parameters
            staged["uniforms"][:count] = uniforms(parameters["seed"], parameters["sample_index"], history.positions)
            history.uniforms = self._inputs["uniforms"][:count]
        return history

    def _masks_of(self, slots: Int64, slot_to_mask: Mapping[int, bytes]) -> TokenMasks | None:
        """Return the masks of draws under a grammar; such rows have no drafts."""
        if not slot_to_mask:
            return None
        row_to_mask = {row: slot_to_mask[slot] for row, slot in enumerate(slots.tolist()) if slot in slot_to_mask}
        return TokenMasks(row_to_mask, self.runtime.upload)

    def _stage_for_device(
        self, staged: Mapping[str, npt.NDArray[Any]], flat: FlatBatch, slots: Int64, graph_size: int | None
    ) -> None:
        """Stage what only device code reads of the batch, with the padding of a graph."""
        num_rows, num_tokens = len(slots), len(flat.positions)
        staged["slots"][:num_rows] = slots
        staged["seq_lens"][:num_rows] = flat.seq_lens
        places, grown = self.batch.grown
        staged["grown_places"][: len(places)] = places
        staged["grown_blocks"][: len(places)] = grown
        flat.fields = {name: staged[name] for name in self._backend_fields}
        if graph_size is None:
            flat.device = self._device_batch(num_rows, num_tokens)
            return
        padding = slice(num_rows, graph_size)
        staged["slots"][padding] = 0
        staged["seq_lens"][padding] = 0
        staged["query_start"][num_rows + 1 : graph_size + 1] = num_rows
        staged["positions"][padding] = 0
        staged["token_places"][padding] = 0
        staged["slot_mapping"][padding] = -1
        flat.device = self._device_batch(graph_size, graph_size)

    def _device_batch(self, num_rows: int, num_tokens: int) -> DeviceBatch:
        inputs = self._inputs
        return DeviceBatch(
            slots=inputs["slots"][:num_rows],
            query_start=inputs["query_start"][: num_rows + 1],
            seq_lens=inputs["seq_lens"][:num_rows],
            slot_mapping=inputs["slot_mapping"][:num_tokens],
            positions=inputs["positions"][:num_tokens],
            block_tables=self.batch.block_tables,
            fields={name: inputs[name] for name in self._backend_fields},
        )

    # ------------------------------------------------------------------------------------------------------ the device
    def _grow_block_tables(self) -> None:
        count = len(self.batch.grown[0])
        if count:
            places, blocks = self._inputs["grown_places"][:count], self._inputs["grown_blocks"][:count]
            self._flat_blocks.index_copy_(0, places, blocks)

    def _forward(self, num_tokens: int, plan: Any) -> torch.Tensor:
        token_ids = self._flat_tokens.index_select(0, self._inputs["token_places"][:num_tokens])
        self.backend.prepare(plan)
        context = ForwardContext(backend=self.backend, plan=plan, kv_caches=self.kv_caches)
        return self.model(token_ids, self._inputs["positions"][:num_tokens], context)

    def _decode_work(self, size: int) -> Callable[[], torch.Tensor]:
        """Stage a decode step of ``size`` rows that writes nowhere; return what computes its hidden states."""
        staged = self._buffers.begin()
        one = np.ones(size, np.int32)
        staged["query_start"][: size + 1] = self._arange[: size + 1]
        staged["positions"][:size] = staged["token_places"][:size] = 0
        staged["slot_mapping"][:size] = -1
        flat = FlatBatch(
            query_lens=one,
            seq_lens=one,
            query_start=staged["query_start"][: size + 1],
            block_table=NO_BLOCKS,
            slot_mapping=staged["slot_mapping"][:size],
            positions=staged["positions"][:size],
        )
        self._stage_for_device(staged, flat, np.zeros(size, np.int64), None)
        plan = self.backend.plan(flat)
        self._buffers.commit()
        return lambda: self._forward(size, plan)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.model.compute_logits(hidden)
        # Rows of the head beyond the vocabulary are padding: nobody trained them.
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]

    # ---------------------------------------------------------------------------------------------------- the tokens
    def _sample(self, prepared: PreparedStep, hidden: torch.Tensor) -> SamplerOutput | None:
        """Draw from the last hidden states of the rows that draw, among ``hidden`` [T, hidden]."""
        draws = prepared.draws
        if draws is None:
            return None
        if not draws.is_batch:
            hidden = hidden.index_select(0, self._inputs["last_tokens"][: len(draws.history.slots)])
        sampled = self._greedy(hidden) if draws.metadata.only_greedy and draws.masks is None else None
        if sampled is None:
            sampled = self.sampler.sample(self._logits(hidden), draws.metadata, draws.history, draws.masks)
        return self._append(sampled)

    def _append(self, sampled: SamplerOutput) -> SamplerOutput:
        """Append the drawn tokens to their rows, on the device."""
        places = self._inputs["drawn_places"][: len(sampled.token_ids)]
        self._flat_tokens.index_copy_(0, places, sampled.token_ids)
        return sampled

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
        starts = np.cumsum(flat.query_lens) - flat.query_lens  # what was staged is the device's by now
        for row, slot in enumerate(prepared.slots.tolist()):
            num_top = batch.slot_to_prompt_logprobs.get(slot)
            if num_top is None:
                continue
            first, end = int(flat.seq_lens[row] - flat.query_lens[row]), int(flat.seq_lens[row])
            end = min(end, int(batch.num_prompt_tokens[slot]) - 1)  # the last prompt position predicts the first output
            if first >= end:
                continue
            start = int(starts[row])
            parts: list[LogprobTensors] = []
            size = max(1, PROMPT_LOGPROB_ELEMENTS // self.vocab_size)
            for begin in range(first, end, size):
                stop = min(begin + size, end)
                logits = self._logits(hidden[start + begin - first : start + stop - first])
                # A copy: by the time that the download is made, the slot may be another's.
                chosen = batch.tokens[slot, begin + 1 : stop + 1].clone()
                parts.append(compute_logprobs(logits, chosen, with_top=num_top > 0))
            found.append(PromptLogprobs(slot, min(num_top, self.vocab_size), parts))
        return found


def _own_fields(limits: StepLimits, block_size: int) -> list[StepField]:
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    grown = rows + tokens // block_size  # a row of k new tokens begins k // block_size + 1 blocks at most
    draws = max(rows, tokens)  # with drafts each token may draw
    return [
        StepField("positions", (tokens,), np.int64),
        StepField("token_places", (tokens,), np.int64),  # of each new token in the flattened batch
        StepField("slot_mapping", (tokens,), np.int64),
        StepField("query_start", (rows + 1,), np.int32),
        StepField("last_tokens", (draws,), np.int64),  # in the flat batch, what each draw follows …
        StepField("drawn_places", (draws,), np.int64),  # … and where in the flattened batch its token goes
        StepField("uniforms", (draws,), np.float64),
        StepField("slots", (rows,), np.int32),
        StepField("seq_lens", (rows,), np.int32),
        StepField("grown_places", (grown,), np.int64),  # in the flattened block tables
        StepField("grown_blocks", (grown,), np.int32),
    ]
