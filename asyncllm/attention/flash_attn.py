"""Attention by a flash-attn package, where one is installed: an alternative to the Triton kernels on CUDA devices.

Which package, and how it is called, is in :mod:`asyncllm.attention.flash_attn_packages`. Here a step becomes calls:
rows with one new token (decode) go to one call, which may be captured, and rows with more (prefill) to another,
whatever else is in the step: the packages compute the two in different orders, and a row's numbers must not depend
on its neighbours.

Padding rows are of length 0, of which the packages read nothing.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncllm.attention.base import AttentionSpec, DeviceBatch, FlatBatch, StepField, StepLimits, side_by_side
from asyncllm.attention.flash_attn_packages import PrefillRows, Rows, choose_block_size, choose_package
from asyncllm.attention.paged import PagedAttention

if TYPE_CHECKING:
    from asyncllm.attention.flash_attn_packages import Package
    from asyncllm.kernels.fused import HeadNorms, Rotation

__all__ = ["FlashAttention", "FlashPlan"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class FlashPlan:
    """One step: its rows with one new token, those with more, and where they are if they are mixed."""

    batch: DeviceBatch
    num_decodes: int
    """Rows, and tokens, of the decode call."""
    max_query_len: int
    is_sorted: bool
    """Whether the rows with one new token come first; else the rows are brought into that order."""
    kv_slots: torch.Tensor
    decode: Rows | None = None
    prefill: PrefillRows | None = None


class FlashAttention(PagedAttention):
    """Paged attention of flash-attn 3, 4 or 2, the first that can serve; keys and values as [2, N, S, KV, D]."""

    name: ClassVar[str] = "flash_attn"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        chosen, reason = choose_package(spec)
        assert chosen is not None, reason
        logger.info("attention by %s, KV blocks of %d tokens", chosen.name, spec.block_size)
        self._package_class = chosen
        self._package: Package | None = None
        self._kv_write = _triton_kv_write(spec.device)

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why no package can serve ``spec``, ``None`` if one can."""
        chosen, reasons = choose_package(spec)
        return reasons if chosen is None else None

    @classmethod
    def default_block_size(cls, spec: AttentionSpec) -> int:
        """Return the block size of the first package that can serve ``spec`` with it."""
        return choose_block_size(spec)

    @property
    def package(self) -> str:
        """Return which package it is."""
        return self._package_class.name

    def step_fields(self, limits: StepLimits) -> list[StepField]:
        """Return where mixed steps have their rows and tokens, and the sums of the lengths of those with more."""
        self._package = self._package_class(limits)
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        return [
            StepField("attn_rows", (rows,), np.int64),  # rows with one new token, then the others
            StepField("attn_tokens", (tokens,), np.int64),  # tokens in the order of these rows
            StepField("attn_query_start", (rows + 1,), np.int32),  # of the rows with more new tokens …
            StepField("attn_key_start", (rows + 1,), np.int32),
        ]

    def plan(self, batch: FlatBatch) -> FlashPlan:
        """Write the step's order and sums and return what :meth:`prepare` needs to know of them."""
        assert batch.device is not None, "there is no device batch"
        device, fields = batch.device, batch.fields
        num_rows, num_tokens = len(batch.query_lens), len(batch.positions)
        if num_rows == num_tokens:  # with its padding, where it is captured
            num_decodes = device.slots.shape[0]
            return FlashPlan(
                batch=device, num_decodes=num_decodes, max_query_len=1, is_sorted=True, kv_slots=device.slot_mapping
            )
        is_long = batch.query_lens > 1
        num_decodes = num_rows - int(np.count_nonzero(is_long))
        is_sorted = not is_long[:num_decodes].any()
        rows = np.argsort(is_long, kind="stable")
        long = rows[num_decodes:]
        for name, lens in (("attn_query_start", batch.query_lens), ("attn_key_start", batch.seq_lens)):
            fields[name][0] = 0
            np.cumsum(lens[long], out=fields[name][1 : len(long) + 1])
        if not is_sorted:
            fields["attn_rows"][:num_rows] = rows
            token_is_long = np.repeat(is_long, batch.query_lens)
            fields["attn_tokens"][:num_tokens] = np.argsort(token_is_long, kind="stable")
        return FlashPlan(
            batch=device,
            num_decodes=num_decodes,
            max_query_len=int(batch.query_lens.max()),
            is_sorted=is_sorted,
            kv_slots=device.slot_mapping,
        )

    def prepare(self, plan: FlashPlan) -> None:
        """Gather the block tables of the step's rows, in the order of the calls."""
        batch, fields, end = plan.batch, plan.batch.fields, plan.num_decodes
        slots, seq_lens = batch.slots, batch.seq_lens
        num_rows = slots.shape[0]
        if not plan.is_sorted:
            rows = fields["attn_rows"][:num_rows]
            slots, seq_lens = slots.index_select(0, rows), seq_lens.index_select(0, rows)
        tables = batch.block_tables.index_select(0, slots)
        if end:
            plan.decode = Rows(tables=tables[:end], seq_lens=seq_lens[:end])
        if end < num_rows:
            plan.prefill = PrefillRows(
                tables=tables[end:],
                seq_lens=seq_lens[end:],
                query_start=fields["attn_query_start"][: num_rows - end + 1],
                key_start=fields["attn_key_start"][: num_rows - end + 1],
                max_query_len=plan.max_query_len,
            )
        if self._kv_write is None:
            plan.kv_slots = batch.slot_mapping.clamp(min=0)  # padding goes to the null block, which nobody reads

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: FlashPlan) -> None:
        """Store ``key`` and ``value`` [T, KV, D] at the step's slots."""
        if self._kv_write is not None:
            self._kv_write(side_by_side(key), side_by_side(value), cache, plan.kv_slots)
            return
        keys, values = cache.flatten(1, 2)  # [N * S, KV, D] each
        keys.index_copy_(0, plan.kv_slots, key)
        values.index_copy_(0, plan.kv_slots, value)

    def rotate_and_write(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        cache: torch.Tensor,
        plan: FlashPlan,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Return the query heads normalised and rotated, and store keys and values, in one launch where triton is."""
        return self.fused.rotate_and_write(heads, rotation, cache, plan.kv_slots, norms)

    def forward(
        self, query: torch.Tensor, cache: torch.Tensor, plan: FlashPlan, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of ``query`` [T, H, D] over the rows' blocks, as [T, H * D]; of padding, any numbers."""
        package = self._package
        assert package is not None, "step_fields() was not asked"
        keys, values = cache[0], cache[1]
        tokens = None
        if not plan.is_sorted:
            tokens = plan.batch.fields["attn_tokens"][: query.shape[0]]
            query = query.index_select(0, tokens)
        parts: list[torch.Tensor] = []
        if plan.decode is not None:
            parts.append(package.decode(query[: plan.num_decodes], keys, values, plan.decode, scale, window))
        if plan.prefill is not None:
            parts.append(package.prefill(query[plan.num_decodes :], keys, values, plan.prefill, scale, window))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tokens is not None:
            out = torch.empty_like(out).index_copy_(0, tokens, out)
        return out.flatten(1)


def _triton_kv_write(device: torch.device) -> Any:
    """Return the operator that stores keys and values, ``None`` where triton is not there for ``device``."""
    if importlib.util.find_spec("triton") is None:
        return None
    from asyncllm.kernels.triton.paged_attention import INTERPRET, kv_write

    return kv_write if device.type == "cuda" or INTERPRET else None
