"""Attention on Triton kernels: the default of CUDA devices, and on the CPU in Triton's interpreter, for tests.

Planned on the host (:mod:`asyncllm.attention.work_list`), copied with the step, launched by the operators of
:mod:`asyncllm.kernels.triton.paged_attention`. Block 0 is never read. A row's numbers are the same bit for bit whatever
its neighbours and the padding.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from asyncllm.attention.base import AttentionSpec, DeviceBatch, FlatBatch, StepField, StepLimits, side_by_side
from asyncllm.attention.paged import PagedAttention
from asyncllm.attention.work_list import LARGE_CHUNK, SMALL_CHUNK, WorkList, WorkListLimits

if TYPE_CHECKING:
    from asyncllm.kernels.fused import HeadNorms, Rotation
    from asyncllm.kernels.triton.paged_attention import Tile

__all__ = ["TritonAttention", "TritonPlan"]

NUM_PARALLEL_ITEMS = 256
"""Items of one row, over its key/value heads, that keep a device busy."""
SCRATCH_BYTES = 512 << 20
"""Rows are cut into fewer parts where these would take more scratch memory; not into fewer than ``MIN_PARTS``."""
MIN_PARTS = 8
MAX_HEAD_DIM = 256
MIN_CAPABILITY = 80
"""Of bfloat16 and of copies that do not wait: Ampere."""


@dataclass(kw_only=True)
class TritonPlan:
    """One step: where its arrays are on the device, and which launches it needs."""

    batch: DeviceBatch
    small: bool
    merge_small: bool
    waves: list[bool]


class TritonAttention(PagedAttention):
    """Paged attention in one kernel for prefill and decode, any block size; keys and values as [2, N, S, KV, D]."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        from asyncllm.kernels.triton import paged_attention as kernels

        self._kernels = kernels
        self._group = spec.num_heads // spec.num_kv_heads
        self._small: Tile
        self._large: Tile
        self._small, self._large = kernels.small_and_large_tile(
            kernels.device_capability(), self._group, spec.head_dim, spec.dtype
        )
        self.max_parts = min(max(NUM_PARALLEL_ITEMS // spec.num_kv_heads, 16), 64)
        """Parts of a row at most, if scratch memory allows."""
        self.softcap = 0.0
        """Scores are ``softcap * tanh(scores / softcap)`` if not zero."""
        self._windows = set[int | None]()
        self._work: WorkList | None = None
        self.scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        """Partial results, and what they are weighted by; every layer writes them anew."""

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why the kernels cannot serve ``spec``, ``None`` if they can."""
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads"
        if not spec.kv_format.is_plain:
            return f"kv_cache_dtype is {spec.kv_cache_dtype!r}; it stores float32, bfloat16 or float16"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"the head dim is {spec.head_dim}; it takes {MAX_HEAD_DIM} at most"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from asyncllm.kernels.triton.paged_attention import INTERPRET, device_capability

        if spec.device.type == "cuda" and 0 < device_capability() < MIN_CAPABILITY:
            return f"the device's compute capability is {device_capability() / 10}; it needs {MIN_CAPABILITY / 10}"
        if spec.device.type == "cuda" or (spec.device.type == "cpu" and INTERPRET):
            return None
        return f"it needs a CUDA device, not {spec.device.type!r} (or TRITON_INTERPRET=1, for tests)"

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Return one zeroed cache [2, N, S, KV, D] per layer; the scratch memory is allocated as well."""
        if self._work is not None and self.scratch is None:
            self._allocate_scratch(self._work)
        return super().allocate(num_blocks)

    def step_fields(self, limits: StepLimits) -> list[StepField]:
        """Return the arrays of the work list."""
        work = self._work_list(limits)
        if self._work is None or self._work.num_slots != work.num_slots:
            self.scratch = None
        fields = work.fields()
        if self._work is None or self._work.fields() != fields:
            self._windows.clear()  # the kernels are compiled for the sizes of its arrays
        self._work = work
        return fields

    def scratch_bytes(self, limits: StepLimits) -> int:
        """Return the memory of the partial results of rows that are cut."""
        return self._work_list(limits).num_slots * self._bytes_per_slot()

    def plan(self, batch: FlatBatch) -> TritonPlan:
        """Fill the step's work list and return the launches that it needs."""
        assert self._work is not None, "step_fields() was not asked"
        assert batch.device is not None, "there is no device batch"
        if self.scratch is None:
            self._allocate_scratch(self._work)
        launches = self._work.plan(batch.query_lens, batch.seq_lens, batch.fields)
        # A decode step may be captured, and then has to be right for other lengths as well.
        is_decode = batch.device.positions.shape[0] == batch.device.slots.shape[0]
        may_cut = self._work.small_parts > 1
        return TritonPlan(
            batch=batch.device,
            small=is_decode or launches.num_small_items > 0,
            merge_small=(is_decode and may_cut) or launches.num_small_merges > 0,
            waves=launches.waves,
        )

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: TritonPlan) -> None:
        """Store ``key`` and ``value`` [T, KV, D] at the step's slots."""
        self._kernels.kv_write(side_by_side(key), side_by_side(value), cache, plan.batch.slot_mapping)

    def rotate_and_write(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        cache: torch.Tensor,
        plan: TritonPlan,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Return the query heads normalised and rotated, and store keys and values, in one launch on a GPU."""
        return self.fused.rotate_and_write(heads, rotation, cache, plan.batch.slot_mapping, norms)

    def forward(
        self, query: torch.Tensor, cache: torch.Tensor, plan: TritonPlan, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of ``query`` [T, H, D] over the rows' blocks, as [T, H * D]; of padding, any numbers."""
        assert self.scratch is not None, "plan() was not asked"
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        is_new = window not in self._windows  # once, also what this step needs not: no later one waits for a compiler
        self._windows.add(window)
        batch, fields = plan.batch, plan.batch.fields
        self._kernels.paged_attention(
            out,
            query,
            cache,
            batch.slots,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            fields["attn_small_items"],
            fields["attn_small_merges"],
            fields["attn_large_items"],
            fields["attn_large_merges"],
            fields["attn_bounds"],
            *self.scratch,
            scale,
            self.softcap,
            window or 0,
            self._small,
            self._large,
            plan.small or is_new,
            plan.merge_small or is_new,
            [True, *plan.waves[1:]] if is_new else plan.waves,
        )
        return out.view(out.shape[0], -1)

    def _work_list(self, limits: StepLimits) -> WorkList:
        parts = self.max_parts
        while parts > MIN_PARTS and limits.max_num_seqs * parts * self._bytes_per_slot() > SCRATCH_BYTES:
            parts //= 2
        tokens = WorkListLimits(
            small_tokens=self._small.rows // self._group,
            large_tokens=self._large.rows // self._group,
            max_parts=parts,
            small_chunk=SMALL_CHUNK,
            large_chunk=LARGE_CHUNK,
        )
        return WorkList(tokens, limits)

    def _bytes_per_slot(self) -> int:
        return 4 * self.spec.num_heads * (self.spec.head_dim + 2)

    def _allocate_scratch(self, work: WorkList) -> None:
        spec, slots = self.spec, max(work.num_slots, 1)
        self.scratch = (
            torch.empty((slots, spec.num_heads, spec.head_dim), dtype=torch.float32, device=spec.device),
            torch.empty((slots, 2, spec.num_heads), dtype=torch.float32, device=spec.device),
        )
