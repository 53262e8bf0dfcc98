"""The persistent batch: everything the worker holds of the running requests, as columns over *slots*.

The scheduler owns the slots. It tells only what changes (:mod:`asyncllm.wire.step`), and a request never moves to
another row: nothing is swapped or condensed. Counters advance here by the scheduler's own rule.

    tokens[slot]        prompt, then output      [0 … num_tokens)
    KV computed                                  [0 … num_computed_tokens)

Tokens and block ids lie on the device. On a CPU that is the host's memory; another device is told of new requests in
one copy of all their rows, and of single blocks with the step's own inputs (:attr:`InputBatch.grown`).
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncllm.sampling.columns import SamplingColumns
from asyncllm.worker.block_table import BlockTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from asyncllm.wire.step import NewRequest, SchedulerOutput
    from asyncllm.worker.device_runtime import DeviceRuntime

__all__ = ["InputBatch"]


class InputBatch:
    """State of the running requests by slot. Used by the worker's thread only."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        # One column more than a request can be long: a step launched before its request ended may still append.
        # The kernel gives the pages as they are first used, so long contexts cost nothing until they are there.
        self.max_tokens = max_model_len + 1
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.num_computed_tokens = np.zeros(num_slots, np.int64)
        self.block_table = BlockTable(num_slots, max_model_len, block_size)
        self.grown: tuple[list[int], list[int]] = ([], [])
        """Of the step that was applied last: places in the flattened block tables, and the ids that belong there."""
        self.sampling = SamplingColumns(
            num_slots, vocab_size=vocab_size, eos_token_ids=eos_token_ids, upload=runtime.upload
        )
        self.slot_to_request_id: dict[int, int] = {}
        self.slot_to_prompt_logprobs: dict[int, int] = {}
        self.version = 0  # counts changes of who owns which slot
        self._runtime = runtime
        self._host_tokens: npt.NDArray[np.int64] | None = None
        if runtime.shares_memory:
            self._host_tokens = np.zeros((num_slots, self.max_tokens), np.int64)
            self.tokens = torch.from_numpy(self._host_tokens)
            self.block_tables = torch.from_numpy(self.block_table.ids)
        else:
            self.tokens = torch.zeros((num_slots, self.max_tokens), dtype=torch.int64, device=runtime.device)
            self.block_tables = torch.zeros(self.block_table.ids.shape, dtype=torch.int32, device=runtime.device)

    def apply(self, step: SchedulerOutput) -> None:
        """Bring the batch to the state in which ``step`` runs: free slots, take new requests, append blocks."""
        for slot in step.freed_slots:
            self._free(slot)
        for request in step.new_requests:
            self._put(request)
        if step.new_requests and self._host_tokens is None:
            self._upload_rows(step.new_requests)
        if step.freed_slots or step.new_requests:
            self.version += 1
        places, grown_by = self.grown = ([], [])
        for slot, block_ids in zip(step.block_slots, step.block_ids, strict=True):
            places += self.block_table.append(slot, block_ids)
            grown_by += block_ids
        for slot, num_computed in zip(step.rewound_slots, step.rewound_num_computed, strict=True):
            self.num_computed_tokens[slot] = num_computed
            self.num_tokens[slot] = num_computed + 1
        if step.draft_slots:
            self._put_drafts(step.draft_slots, step.draft_token_ids)

    def _free(self, slot: int) -> None:
        del self.slot_to_request_id[slot]
        self.slot_to_prompt_logprobs.pop(slot, None)
        self.sampling.forget(slot)
        self.block_table.clear(slot)

    def _put(self, request: NewRequest) -> None:
        slot, count = request.slot, len(request.token_ids)
        assert slot not in self.slot_to_request_id, f"slot {slot} is taken by {self.slot_to_request_id[slot]}"
        self.slot_to_request_id[slot] = request.request_id
        if self._host_tokens is not None:
            self._host_tokens[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.block_table.put(slot, request.block_ids)
        self.sampling.put(slot, request.sampling)
        # With output the whole prompt was computed before the preemption, and its logprobs were reported then.
        if request.sampling.prompt_logprobs >= 0 and count == request.num_prompt_tokens:
            self.slot_to_prompt_logprobs[slot] = request.sampling.prompt_logprobs

    def _put_drafts(self, slots: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """Write drafts behind the rows' tokens, and count them as tokens: what is drawn there overwrites them."""
        begins = self.num_tokens[slots]
        if self._host_tokens is None:
            self._upload_to(self.tokens, slots, token_ids, np.int64, begins)
        for slot, begin, row in zip(slots, begins.tolist(), token_ids, strict=True):
            if self._host_tokens is not None:
                self._host_tokens[slot, begin : begin + len(row)] = row
            self.num_tokens[slot] += len(row)

    def _upload_rows(self, requests: Sequence[NewRequest]) -> None:
        """Write tokens and block ids of new requests to the device."""
        slots = [request.slot for request in requests]
        self._upload_to(self.tokens, slots, [request.token_ids for request in requests], np.int64)
        self._upload_to(self.block_tables, slots, [request.block_ids for request in requests], np.int32)

    def _upload_to(
        self,
        matrix: torch.Tensor,
        rows: Sequence[int],
        values: Sequence[list[int]],
        dtype: type[np.generic],
        columns: npt.NDArray[np.int64] | int = 0,
    ) -> None:
        """Write ``values`` into ``rows`` of ``matrix``, from ``columns`` on."""
        lengths = [len(row) for row in values]
        begins = np.repeat(np.array(rows, np.int64) * matrix.shape[1] + columns, lengths)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        flat: npt.NDArray[Any] = np.fromiter((value for row in values for value in row), dtype, sum(lengths))
        places = begins + np.arange(len(flat)) - starts
        matrix.view(-1).index_copy_(0, self._runtime.upload(places), self._runtime.upload(flat))
