"""The persistent batch: everything the worker holds of the running requests, as columns over *slots*.

The scheduler owns the slots. It tells only what changes (:mod:`asyncllm.wire.step`), and a request never moves to
another row: nothing is swapped or condensed. Counters advance here by the scheduler's own rule.

    tokens[slot]        prompt, then output      [0 … num_tokens)
    KV computed                                  [0 … num_computed_tokens)
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncllm.sampling.columns import SamplingColumns
from asyncllm.worker.block_table import BlockTable

if TYPE_CHECKING:
    from asyncllm.wire.step import NewRequest, SchedulerOutput

__all__ = ["InputBatch"]


class InputBatch:
    """State of the running requests by slot. Used by the worker's thread only."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        # One column more than a request can be long: a step launched before its request ended may still append.
        # The kernel gives the pages as they are first used, so long contexts cost nothing until they are there.
        self.max_tokens = max_model_len + 1
        self._host_tokens = np.zeros((num_slots, self.max_tokens), np.int64)
        self.tokens = torch.from_numpy(self._host_tokens).to(device)  # on a CPU the same memory
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.num_computed_tokens = np.zeros(num_slots, np.int64)
        self.block_table = BlockTable(num_slots, max_model_len, block_size)
        self.sampling = SamplingColumns(num_slots, vocab_size=vocab_size, eos_token_ids=eos_token_ids, device=device)
        self.slot_to_request_id: dict[int, int] = {}
        self.slot_to_prompt_logprobs: dict[int, int] = {}
        self.version = 0  # counts changes of who owns which slot

    def apply(self, step: SchedulerOutput) -> None:
        """Bring the batch to the state in which ``step`` runs: free slots, take new requests, append blocks."""
        for slot in step.freed_slots:
            self._free(slot)
        for request in step.new_requests:
            self._put(request)
        if step.freed_slots or step.new_requests:
            self.version += 1
        for slot, block_ids in zip(step.block_slots, step.block_ids, strict=True):
            self.block_table.append(slot, block_ids)

    def _free(self, slot: int) -> None:
        del self.slot_to_request_id[slot]
        self.slot_to_prompt_logprobs.pop(slot, None)
        self.sampling.forget(slot)
        self.block_table.clear(slot)

    def _put(self, request: NewRequest) -> None:
        slot, count = request.slot, len(request.token_ids)
        assert slot not in self.slot_to_request_id, f"slot {slot} is taken by {self.slot_to_request_id[slot]}"
        self.slot_to_request_id[slot] = request.request_id
        self._host_tokens[slot, :count] = request.token_ids
        if self.tokens.device.type != "cpu":
            self.tokens[slot, :count] = torch.from_numpy(self._host_tokens[slot, :count])
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        self.block_table.put(slot, request.block_ids)
        self.sampling.put(slot, request.sampling)
        # With output the whole prompt was computed before the preemption, and its logprobs were reported then.
        if request.sampling.prompt_logprobs >= 0 and count == request.num_prompt_tokens:
            self.slot_to_prompt_logprobs[slot] = request.sampling.prompt_logprobs
