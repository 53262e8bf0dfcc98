"""The one attention seam: a flat batch of new tokens attends over paged KV blocks.

Letters: ``T`` new tokens of the step, ``B`` rows (requests), ``H`` query heads, ``KV`` key/value heads, ``D`` head dim,
``N`` blocks, ``S`` block size.
Prefill, chunked prefill and decode are one case: row b has ``query_lens[b]`` new tokens at
the end of its ``seq_lens[b]`` tokens, and each attends causally to all before it and itself.

Order in a step: :meth:`AttentionBackend.plan` on the host, from lengths alone; the step's packed copy to the device;
:meth:`AttentionBackend.prepare` once; then, in each layer, :meth:`AttentionBackend.write_kv` puts the new keys and
values into their slots, and :meth:`AttentionBackend.forward` reads everything back through the block table. Block 0 is
the null block.

What runs after the copy may be captured in a CUDA graph and replayed in other steps: it reads nothing of the device on
the host, and uses only memory that stays where it is (:class:`DeviceBatch`, the caches, the backend's own scratch).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncllm.kernels.base import Format, Kernels
from asyncllm.kernels.fused import HeadNorms, Rotation, rotate_heads

__all__ = [
    "NAME_TO_KV_FORMAT",
    "AttentionBackend",
    "AttentionSpec",
    "DeviceBatch",
    "FlatBatch",
    "GraphSupport",
    "KVCache",
    "StepField",
    "StepLimits",
    "copy_along",
    "side_by_side",
    "why_not_in_torch",
]

NAME_TO_KV_FORMAT = {
    "float32": Format.F32,
    "bfloat16": Format.BF16,
    "float16": Format.F16,
    "int8": Format.I8,
}
"""What the option ``kv_cache_dtype`` may name."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

KVCache = Any
"""One layer's blocks, in whatever layout the backend wants; only the backend looks inside."""


class GraphSupport(enum.Enum):
    """Which steps of a backend may be captured in a CUDA graph and replayed with other lengths."""

    NONE = enum.auto()
    DECODE = enum.auto()
    """Those in which every row has one new token."""
    ALWAYS = enum.auto()


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest step that there will be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class StepField(NamedTuple):
    """An array that a backend wants to have on the device in each step, besides those of :class:`DeviceBatch`."""

    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of a model, equal for all its layers."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None = None
    """The compiled operators of this worker, where its platform has some."""
    kv_cache_dtype: str = "auto"
    """``auto``: keys and values are stored as ``dtype``."""

    @property
    def kv_format(self) -> Format:
        """How keys and values are stored."""
        if self.kv_cache_dtype == "auto":
            return Format.of(self.dtype)
        return NAME_TO_KV_FORMAT[self.kv_cache_dtype]


@dataclass(kw_only=True)
class FlatBatch:
    """Lengths and places of one step, known on the host: the backend plans from these alone, never from device data.

    Arrays are views of the runner's persistent buffers and are overwritten by a later step.
    """

    query_lens: Int32  # [B] new tokens per row, >= 1
    seq_lens: Int32  # [B] tokens per row including the new ones
    query_start: Int32  # [B + 1] first new token of each row in the flat batch
    block_table: Int32  # [B, max_blocks] block ids; unused entries are 0; [0, 0] for backends that read the device's
    slot_mapping: Int64  # [T] block id * block size + offset of each new token
    positions: Int64  # [T] position of each new token in its request
    fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])
    """The backend's :class:`StepField` arrays by name, for its ``plan`` to write; what is in them is old."""
    device: DeviceBatch | None = None
    """There where the backend asked for it (``needs_device_batch``)."""


@dataclass(kw_only=True)
class DeviceBatch:
    """The step on the device: the first rows of static tensors, padded to the B' rows and T' tokens that are computed.

    Filled by the step's packed copy, so not before :meth:`AttentionBackend.prepare`. Padding rows have no new token and
    slot 0; padding tokens have position 0 and the KV slot -1, where nothing is written.
    """

    slots: torch.Tensor  # [B'] int32: the row of ``block_tables`` that each row owns
    query_start: torch.Tensor  # [B' + 1] int32
    seq_lens: torch.Tensor  # [B'] int32
    slot_mapping: torch.Tensor  # [T'] int64
    positions: torch.Tensor  # [T'] int64
    block_tables: torch.Tensor  # [max_num_seqs, max_blocks] int32, of all slots
    fields: Mapping[str, torch.Tensor]  # the whole of each StepField


class AttentionBackend(ABC):
    """One way to compute attention over paged KV. Stateless between steps but for its caches of scratch memory."""

    name: ClassVar[str]
    needs_device_batch: ClassVar[bool] = False
    """Whether the backend reads :attr:`FlatBatch.device`."""
    graphs: ClassVar[GraphSupport] = GraphSupport.NONE

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve ``spec`` (head dim, dtype, block size …), ``None`` if it can."""
        return None

    @classmethod
    def default_block_size(cls, spec: AttentionSpec) -> int:
        """Return the block size to take for ``spec`` where nobody asked for one."""
        return spec.block_size

    @abstractmethod
    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> list[KVCache]:
        """Return one cache per layer of ``num_blocks`` blocks each, the null block 0 included."""

    def scrub(self, caches: list[KVCache], block_ids: list[int]) -> None:  # noqa: B027
        """Make every number in these blocks finite, after a request whose numbers were not.

        Needed where a backend multiplies tokens past the end of a row by zero, which does not silence a NaN; one that
        never reads past the end does nothing.
        """

    @abstractmethod
    def copy_blocks(self, caches: list[KVCache], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks ``sources`` to ``targets`` [int64, on the device] in all layers, bit for bit.

        All are read before any is written, so a block may be in both; no target is there twice.
        """

    def step_fields(self, limits: StepLimits) -> list[StepField]:
        """Return the arrays that :meth:`plan` writes for the device; asked once, before :meth:`allocate`."""
        return []

    @abstractmethod
    def plan(self, batch: FlatBatch) -> Any:
        """Return what :meth:`write_kv` and :meth:`forward` need in every layer; computed once per step, on the host."""

    def prepare(self, plan: Any) -> None:  # noqa: B027
        """Do the work on the device that all layers share; before the first of them."""

    @abstractmethod
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        """Store ``key`` and ``value`` [T, KV, D] at the step's slots."""

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, cache: KVCache, plan: Any, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """Return the query heads [T, H, D] of ``heads`` normalised and rotated; store keys and values.

        ``heads`` [T, H + 2 * KV, D] are query, key and value heads, contiguous in each token; keys are normalised and
        rotated before they are stored. A backend that has it in one launch overrides this.
        """
        num_kv_heads = self.spec.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = rotate_heads(heads, num_kv_heads, rotation, norms)
        self.write_kv(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], cache, plan)
        return rotated[:, :num_heads]

    @abstractmethod
    def forward(
        self, query: torch.Tensor, cache: KVCache, plan: Any, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of ``query`` [T, H, D] over the rows' blocks, as [T, H * D].

        ``window``: a token sees itself and ``window - 1`` tokens before it; ``None`` for all.
        """


def copy_along(dim: int, caches: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy, in each cache, the blocks ``sources`` along ``dim`` to ``targets``; all are read before any is written."""
    for cache in caches:
        cache.index_copy_(dim, targets, cache.index_select(dim, sources))


def side_by_side(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` [T, KV, D] with each token's numbers next to each other; tokens may be apart."""
    if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]:
        return rows
    return rows.contiguous()


def why_not_in_torch(spec: AttentionSpec) -> str | None:
    """Return why a backend in torch cannot serve ``spec``, ``None`` if it can."""
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} key/value heads"
    if not spec.kv_format.is_plain:
        return (
            f"kv_cache_dtype is {spec.kv_cache_dtype!r}, which needs the native kernels (dtype float32);"
            " torch stores float32, bfloat16 or float16"
        )
    return None
