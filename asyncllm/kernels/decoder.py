"""A whole decoder as data, and what runs it: one call per step.

The description is generic enough for the Llama family (with biases, query and key norms, sliding windows, norms on the
outputs of attention and MLP) and for OPT (LayerNorm before or after, learned positions, no gate, projections around).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncllm.kernels.base import Activation, Format, KvShape, Norm, PackedWeight, Rotary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncllm.kernels.base import Batch

__all__ = ["Decoder", "DecoderSpec", "LayerSpec", "StepOutput"]

NO_NORM = Norm()


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer, in the order of its parts."""

    attention_norm: Norm
    q: PackedWeight
    k: PackedWeight
    v: PackedWeight
    q_norm: Norm = NO_NORM
    k_norm: Norm = NO_NORM
    o: PackedWeight
    attention_out_norm: Norm = NO_NORM
    mlp_norm: Norm
    gate: PackedWeight | None = None
    up: PackedWeight
    down: PackedWeight
    mlp_out_norm: Norm = NO_NORM
    rotary: Rotary | None = None
    attention_scale: float
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only model.

    ``post_norm``: ``attention_norm`` and ``mlp_norm`` of a layer are applied after the residual instead of before.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: Format = Format.F32
    activation: Activation
    post_norm: bool = False
    embedding: PackedWeight
    embedding_scale: float = 1.0
    position_embedding: torch.Tensor | None = None  # float32 [max_position + offset, hidden_size]
    position_offset: int = 0
    project_in: PackedWeight | None = None
    project_out: PackedWeight | None = None
    layers: Sequence[LayerSpec]
    final_norm: Norm
    head: PackedWeight

    @property
    def kv_shape(self) -> KvShape:
        """The cache of each layer."""
        return KvShape(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, block_size=self.block_size, format=self.kv_format
        )

    def check(self) -> None:
        """Return if all sizes fit each other.

        :raises ValueError: some do not; names them.
        """
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden = self.hidden_size
        for index, layer in enumerate(self.layers):
            wanted = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
            wanted |= {"up": (layer.up.n, hidden), "gate": (layer.up.n, hidden), "down": (hidden, layer.up.n)}
            for name, shape in wanted.items():
                weight: PackedWeight | None = getattr(layer, name)
                if weight is not None and (weight.n, weight.k) != shape:
                    raise ValueError(f"layer {index}: {name} is {weight.n} x {weight.k}, not {shape[0]} x {shape[1]}")
        inner = self.embedding.k if self.project_in is None else self.project_in.n
        outer = self.head.k if self.project_out is None else self.project_out.k
        if (inner, outer) != (hidden, hidden):
            raise ValueError(f"the embedding gives {inner} and the head takes {outer}; hidden_size is {hidden}")


class StepOutput(NamedTuple):
    """What a step gives; ``None`` for what was not asked."""

    hidden: torch.Tensor | None  # [T, head.k] final hidden states of all tokens
    logits: torch.Tensor | None  # [R, vocabulary]
    best: torch.Tensor | None  # [R] int64: the greedy token


class Decoder(ABC):
    """A decoder bound to its weights."""

    spec: DecoderSpec

    @abstractmethod
    def step(
        self,
        batch: Batch,
        kv_caches: Sequence[torch.Tensor],
        sample_rows: npt.NDArray[np.int32],
        *,
        with_hidden: bool = False,
        with_logits: bool = True,
        with_best: bool = True,
    ) -> StepOutput:
        """Run all layers over the flat batch: store the new tokens' keys and values, and return what is asked.

        ``sample_rows`` [R]: rows of the flat batch that sample; only these go through the head.

        :raises ValueError: a token id or a sample row is out of range.
        """
