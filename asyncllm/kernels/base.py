"""The interface of the CPU operators, and the plain data they take.

Letters: ``T`` new tokens of a step, ``B`` rows (requests), ``H`` query heads, ``KV`` key/value heads, ``D`` head dim,
``S`` block size, ``N`` x ``K`` a weight of N outputs and K inputs, ``M`` rows of an activation matrix.

Activations are float32 tensors on the CPU whose last dimension is contiguous; rows may be strided. All methods are
called from one thread at a time; none of them keeps a reference to its arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from asyncllm.kernels.decoder import Decoder, DecoderSpec

__all__ = [
    "SAMPLING_DTYPE",
    "Activation",
    "Batch",
    "DrawnTokens",
    "Format",
    "HeadOutput",
    "Kernels",
    "KvShape",
    "Norm",
    "NormKind",
    "PackedWeight",
    "Rotary",
    "lossless_format",
]


class Format(IntEnum):
    """How numbers are stored. The values are those of the C interface."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q4_K = 6
    Q5_K = 7
    Q6_K = 8
    Q5_0 = 9
    Q5_1 = 10
    Q2_K = 11
    Q3_K = 12
    I8 = 32  # keys and values only: int8 with one float32 scale for each token and head

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of a plain format; ``torch.uint8`` for rows of GGUF blocks."""
        return _FORMAT_TO_DTYPE.get(self, torch.uint8)

    @property
    def is_plain(self) -> bool:
        """Whether each number stands for itself: a dtype of torch."""
        return self in _FORMAT_TO_DTYPE

    @property
    def is_quantized(self) -> bool:
        """Whether rows are GGUF blocks."""
        return Format.Q8_0 <= self < Format.I8

    @property
    def takes_plain(self) -> bool:
        """Whether plain numbers can be packed as this: as they are, or quantized on the way."""
        return self.is_plain or self in (Format.Q8_0, Format.Q4_1)

    @property
    def block_bytes(self) -> int:
        """Bytes of one GGUF block."""
        return _FORMAT_TO_BLOCK[self][1]

    @property
    def block_values(self) -> int:
        """Values of one GGUF block, of which a row is a multiple."""
        return _FORMAT_TO_BLOCK[self][0]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of ``k`` values in GGUF blocks."""
        return k // self.block_values * self.block_bytes

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the plain format of ``dtype``.

        :raises ValueError: it is none of float32, bfloat16, float16.
        """
        for known, its_dtype in _FORMAT_TO_DTYPE.items():
            if its_dtype == dtype:
                return known
        raise ValueError(f"weights are float32, bfloat16 or float16, not {dtype}")


_FORMAT_TO_BLOCK = {
    Format.Q8_0: (32, 34),
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q4_K: (256, 144),
    Format.Q5_K: (256, 176),
    Format.Q6_K: (256, 210),
    Format.Q5_0: (32, 22),
    Format.Q5_1: (32, 24),
    Format.Q2_K: (256, 84),
    Format.Q3_K: (256, 110),
}
_FORMAT_TO_DTYPE = {Format.F32: torch.float32, Format.BF16: torch.bfloat16, Format.F16: torch.float16}


class Activation(IntEnum):
    """Elementwise functions; the values are those of the C interface."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU_TANH = 3
    GELU = 4


class NormKind(IntEnum):
    """Kinds of normalisation; the values are those of the C interface."""

    NONE = 0
    RMS = 1
    LAYER = 2


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A normalisation of rows; ``weight`` and ``bias`` float32 [n] or ``None``."""

    kind: NormKind = NormKind.NONE
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: ``cos``, ``sin`` float32 [max_position, dim / 2], for the first ``dim`` elements of a head."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    @property
    def dim(self) -> int:
        """How many elements of a head are rotated."""
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """One layer's paged KV cache: blocks of ``block_size`` tokens for all its heads."""

    num_kv_heads: int
    head_dim: int
    block_size: int
    format: Format = Format.F32


@dataclass(eq=False, kw_only=True)
class PackedWeight:
    """A weight [n, k] in the form that the operators read; only the :class:`Kernels` that made it look inside.

    ``integer``: products with it quantize the activations to 16 bits, with a scale for each row and 32 inputs, and sum
    integers; else arithmetic is float32.
    """

    n: int
    k: int
    format: Format
    data: torch.Tensor
    bias: torch.Tensor | None = None
    integer: bool = False
    cache: dict[str, object] = field(default_factory=dict[str, object])


class Batch(NamedTuple):
    """The flat batch of a step, as numpy arrays; rows as in :class:`asyncllm.attention.base.FlatBatch`."""

    token_ids: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T]
    slot_mapping: npt.NDArray[np.int64]  # [T]
    query_start: npt.NDArray[np.int32]  # [B + 1]
    seq_lens: npt.NDArray[np.int32]  # [B]
    block_table: npt.NDArray[np.int32]  # [B, max_blocks], rows may be strided


class HeadOutput(NamedTuple):
    """What the head gives for R rows: the greedy token of each with its logit, and all logits if they were wanted."""

    best: torch.Tensor  # [R] int64
    best_logits: torch.Tensor  # [R] float32, the logit of that token
    logits: torch.Tensor | None  # [R, vocabulary] float32


SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", np.float32),  # 0: the greatest logit
        ("top_p", np.float32),  # in (0, 1]
        ("min_p", np.float32),
        ("top_k", np.int32),  # 0: all
        ("seed", np.uint64),
        ("sample_index", np.int64),
    ]
)
"""How one row is drawn: ``allm_sampling`` of the C interface."""


class DrawnTokens(NamedTuple):
    """One token for each of R rows."""

    token_ids: torch.Tensor  # [R] int64
    best_logits: torch.Tensor  # [R] float32, the greatest logit; a row without a finite one has no valid token


class Kernels(ABC):
    """All operators of one engine, with the threads that run them."""

    name: str

    @property
    @abstractmethod
    def description(self) -> str:
        """One line for the log and for ``info``: which library, which instruction set, how many threads."""

    # ---- weights -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty_weight(
        self, n: int, k: int, stored_as: Format, bias: torch.Tensor | None = None, *, integer: bool = False
    ) -> PackedWeight:
        """Return a weight whose rows are still to be filled by :meth:`pack_rows`.

        :raises ValueError: ``k`` does not fit the format's blocks (``Q8_0`` and ``Q4_1`` with ``integer`` take any), or
            ``integer`` is set for a plain format.
        """

    @abstractmethod
    def pack_rows(self, weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
        """Fill the rows from ``first_row`` on with ``rows`` [R, k]; quantized: uint8 [R, bytes of a row].

        Plain numbers for a weight in ``Q8_0`` or ``Q4_1`` are quantized: as ``ggml`` does it, and with the scale and
        minimum of least squared error among those tried.

        :raises ValueError: shape or dtype do not fit, or these operators do not quantize.
        """

    def pack(
        self,
        rows: torch.Tensor,
        stored_as: Format | None = None,
        bias: torch.Tensor | None = None,
        *,
        integer: bool = False,
    ) -> PackedWeight:
        """Return ``rows`` [n, k] as a weight, stored as ``stored_as`` (default: the smallest that loses nothing)."""
        chosen = lossless_format(rows) if stored_as is None else stored_as
        weight = self.empty_weight(rows.shape[0], rows.shape[1], chosen, bias, integer=integer)
        self.pack_rows(weight, 0, rows)
        return weight

    def pack_blocks(
        self, rows: torch.Tensor, stored_as: Format, bias: torch.Tensor | None = None, *, integer: bool = False
    ) -> PackedWeight:
        """Return GGUF blocks ``rows`` (uint8 [n, bytes of a row]) as a weight [n, k] with exactly their values."""
        k = rows.shape[1] // stored_as.block_bytes * stored_as.block_values
        weight = self.empty_weight(rows.shape[0], k, stored_as, bias, integer=integer)
        self.pack_rows(weight, 0, rows)
        return weight

    @abstractmethod
    def gather_rows(self, weight: PackedWeight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return rows ``ids`` [T] (int64) of ``weight`` times ``scale``, [T, k]: the embedding.

        :raises ValueError: an id is not a row of it.
        """

    # ---- matrix products ---------------------------------------------------------------------------------------------

    @abstractmethod
    def linear(self, x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x`` [M, k] times ``weight`` plus its bias, [M, n], in ``out`` where it is given."""

    @abstractmethod
    def gated_linear(
        self, x: torch.Tensor, gate: PackedWeight | None, up: PackedWeight, activation: Activation
    ) -> torch.Tensor:
        """Return ``activation(x @ gate.T) * (x @ up.T)``, or ``activation(x @ up.T)`` without a gate, [M, n]."""

    @abstractmethod
    def head(self, x: torch.Tensor, weight: PackedWeight, *, with_logits: bool = True) -> HeadOutput:
        """Return the greatest logit of each row of ``x`` and its index (ties: the lowest), and all logits."""

    def draw_tokens(
        self, logits: torch.Tensor, samplings: npt.NDArray[np.void], positions: npt.NDArray[np.int64]
    ) -> DrawnTokens | None:
        """Return a token of each row of ``logits`` [R, V]; ``None``: these kernels leave drawing to torch.

        ``samplings`` [R] of :data:`SAMPLING_DTYPE`; ``positions`` [R]: the output position that each row draws. The
        distribution and its numbers are those of :mod:`asyncllm.sampling.sampler`, equal within rounding.
        """
        return None

    # ---- elementwise -------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Add ``residual`` to ``x`` [M, n] in place and return the norm of the sum."""

    @abstractmethod
    def activate(self, gate: torch.Tensor, activation: Activation, up: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``activation(gate) * up``, [M, n]."""

    # ---- attention ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def why_not_kv(self, shape: KvShape) -> str | None:
        """Return why a cache of this shape is not possible, ``None`` if it is."""

    @abstractmethod
    def kv_block_bytes(self, shape: KvShape) -> int:
        """Return the bytes of one block of one layer."""

    @abstractmethod
    def allocate_kv(self, shape: KvShape, num_blocks: int) -> torch.Tensor:
        """Return one layer's cache of ``num_blocks`` blocks, zeroed page by page as it is used."""

    @abstractmethod
    def rotate_and_write(
        self,
        shape: KvShape,
        cache: torch.Tensor,
        batch: Batch,
        query: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
    ) -> None:
        """Norm and rotate ``query`` [T, H, D] and ``key`` [T, KV, D] in place; store ``key`` and ``value`` by slots.

        The heads of a token are contiguous. A token with a negative slot is not stored.
        """

    @abstractmethod
    def read_kv(self, shape: KvShape, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value [len(slots), KV, D] in float32 of ``slots`` (int64)."""

    @abstractmethod
    def attention(
        self,
        shape: KvShape,
        cache: torch.Tensor,
        batch: Batch,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return causal attention of ``query`` [T, H, D] over the rows' blocks, [T, H * D].

        ``window``: a token sees itself and ``window - 1`` tokens before it; ``None`` for all.
        """

    # ---- a whole decoder ---------------------------------------------------------------------------------------------

    @abstractmethod
    def make_decoder(self, spec: DecoderSpec) -> Decoder:
        """Return the decoder that ``spec`` describes, ready to step.

        :raises ValueError: sizes contradict each other.
        """


def lossless_format(weight: torch.Tensor) -> Format:
    """Return the smallest plain format that holds every value of ``weight`` exactly.

    A checkpoint saved in bfloat16 and loaded as float32 is found out and stored in two bytes again.
    """
    if weight.dtype != torch.float32:
        return Format.of(weight.dtype)
    for small in (Format.BF16, Format.F16):
        if all(torch.equal(part, part.to(small.dtype).float()) for part in torch.split(weight, 4096)):
            return small
    return Format.F32
