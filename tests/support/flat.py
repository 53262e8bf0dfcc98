"""A model driven by hand: flat batches over paged KV blocks, without scheduler, runner or engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, FlatBatch
from asyncllm.attention.native import NativeAttention
from asyncllm.attention.reference import ReferenceAttention
from asyncllm.kernels.base import Kernels
from asyncllm.models.base import CausalLM, ForwardContext, StepModel
from asyncllm.models.native import NativeModel

BLOCK_SIZE = 4
NATIVE_BLOCK_SIZE = 16


class FlatDriver:
    """Keeps the rows of a model: each row has its own blocks, interleaved with those of the others.

    With ``kernels``, by which the model must have been built, it runs as one native call per step.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        max_rows: int = 4,
        max_tokens: int = 96,
        backend_class: type[AttentionBackend] = ReferenceAttention,
        kernels: Kernels | None = None,
    ) -> None:
        self.block_size = BLOCK_SIZE if kernels is None else NATIVE_BLOCK_SIZE
        self.model: StepModel = model
        if kernels is not None:
            self.model, backend_class = NativeModel(model, kernels, block_size=self.block_size), NativeAttention
        dtype = next(model.parameters()).dtype
        self.backend = backend_class(
            AttentionSpec(
                num_layers=model.num_layers,
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                block_size=self.block_size,
                dtype=dtype,
                device=torch.device("cpu"),
                kernels=kernels,
            )
        )
        self.max_blocks = -(-max_tokens // self.block_size)
        self.max_rows = max_rows
        self.kv_caches = self.backend.allocate(1 + max_rows * self.max_blocks)
        self.num_computed = [0] * max_rows

    def blocks(self, row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the block ids of ``row``: every ``max_rows``-th one, so that no two neighbours belong together."""
        return 1 + row + self.max_rows * np.arange(self.max_blocks, dtype=np.int32)

    def step(self, row_to_tokens: Mapping[int, Sequence[int]], *, last_only: bool = False) -> dict[int, torch.Tensor]:
        """Run one step that appends tokens to rows, and return the logits [new tokens, vocab] of each row.

        ``last_only``: [1, vocab], of each row's last token.
        """
        rows, lengths = list(row_to_tokens), [len(tokens) for tokens in row_to_tokens.values()]
        positions = np.concatenate(
            [self.num_computed[row] + np.arange(n) for row, n in zip(rows, lengths, strict=True)]
        )
        owners = np.repeat(rows, lengths)
        slots = (
            1 + owners + self.max_rows * (positions // self.block_size)
        ) * self.block_size + positions % self.block_size
        batch = FlatBatch(
            query_lens=np.array(lengths, np.int32),
            seq_lens=np.array([self.num_computed[row] + n for row, n in zip(rows, lengths, strict=True)], np.int32),
            query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            block_table=np.stack([self.blocks(row) for row in rows]),
            slot_mapping=slots.astype(np.int64),
            positions=positions.astype(np.int64),
        )
        token_ids = torch.tensor([token for tokens in row_to_tokens.values() for token in tokens])
        with torch.inference_mode():
            context = ForwardContext(backend=self.backend, plan=self.backend.plan(batch), kv_caches=self.kv_caches)
            hidden = self.model(token_ids, torch.from_numpy(batch.positions), context)
            if last_only:
                hidden, sampled = hidden[batch.query_start[1:] - 1], [1] * len(rows)
            else:
                sampled = lengths
            logits = self.model.compute_logits(hidden)
        for row, count in zip(rows, lengths, strict=True):
            self.num_computed[row] += count
        return dict(zip(rows, logits.split(sampled), strict=True))

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, row: int = 0) -> list[int]:
        """Return ``num_tokens`` greedy tokens after ``prompt``, on a row that has none yet."""
        return self.greedy_all({row: prompt}, num_tokens)[row]

    def greedy_all(self, row_to_prompt: Mapping[int, Sequence[int]], num_tokens: int) -> dict[int, list[int]]:
        """Return ``num_tokens`` greedy tokens after each prompt, all rows in each step."""
        tokens: dict[int, list[int]] = {row: [] for row in row_to_prompt}
        following: dict[int, Sequence[int]] = dict(row_to_prompt)
        for _ in range(num_tokens):
            logits = self.step(following, last_only=True)
            for row in tokens:
                following[row] = [int(logits[row].argmax())]
                tokens[row].extend(following[row])
        return tokens
