"""A whole decoder as a sequence of operators: how a step is put together, in reading order.

Works with any :class:`~asyncllm.kernels.base.Kernels`; the torch fallback runs it, and the tests hold the native
library's single call to it.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncllm.kernels.base import Norm, NormKind
from asyncllm.kernels.decoder import Decoder, DecoderSpec, LayerSpec, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from asyncllm.kernels.base import Batch, Kernels

__all__ = ["ComposedDecoder"]


class ComposedDecoder(Decoder):
    """``spec`` run operator by operator on ``kernels``."""

    def __init__(self, kernels: Kernels, spec: DecoderSpec) -> None:
        spec.check()
        self.spec = spec
        self._kernels = kernels

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
        """Run all layers over the flat batch."""
        spec, kernels = self.spec, self._kernels
        rows = torch.from_numpy(sample_rows.astype(np.int64))
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(batch.token_ids):
            raise ValueError("a sample row of the step is out of range")
        hidden = self._embed(batch)
        for layer, cache in zip(spec.layers, kv_caches, strict=True):
            hidden = self._half(hidden, layer.attention_norm, partial(self._attend, layer, cache, batch))
            hidden = self._half(hidden, layer.mlp_norm, partial(self._mlp, layer))
        if not with_hidden:
            hidden = hidden[rows]
        hidden = kernels.add_norm(hidden, spec.final_norm)
        if spec.project_out is not None:
            hidden = kernels.linear(hidden, spec.project_out)
        if not (with_logits or with_best):
            return StepOutput(hidden if with_hidden else None, None, None)
        sampled = hidden[rows] if with_hidden else hidden
        best, _, logits = kernels.head(sampled, spec.head, with_logits=with_logits)
        return StepOutput(hidden if with_hidden else None, logits, best if with_best else None)

    def _embed(self, batch: Batch) -> torch.Tensor:
        spec, kernels = self.spec, self._kernels
        hidden = kernels.gather_rows(spec.embedding, torch.from_numpy(batch.token_ids), spec.embedding_scale)
        if spec.project_in is not None:
            hidden = kernels.linear(hidden, spec.project_in)
        if spec.position_embedding is not None:
            hidden += spec.position_embedding[torch.from_numpy(batch.positions) + spec.position_offset]
        return hidden

    def _half(self, hidden: torch.Tensor, norm: Norm, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the residual stream after attention or MLP with its norm before or after."""
        if self.spec.post_norm:
            return self._kernels.add_norm(hidden, norm, inner(hidden))
        return hidden.add_(inner(self._kernels.add_norm(hidden, norm)))

    def _attend(self, layer: LayerSpec, cache: torch.Tensor, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        spec, kernels, shape = self.spec, self._kernels, self.spec.kv_shape
        query, key, value = (
            kernels.linear(x, part).view(-1, part.n // spec.head_dim, spec.head_dim)
            for part in (layer.q, layer.k, layer.v)
        )
        kernels.rotate_and_write(
            shape,
            cache,
            batch,
            query,
            key,
            value,
            rotary=layer.rotary,
            query_norm=layer.q_norm,
            key_norm=layer.k_norm,
        )
        attended = kernels.attention(shape, cache, batch, query, scale=layer.attention_scale, window=layer.window)
        return self._out_norm(kernels.linear(attended, layer.o), layer.attention_out_norm)

    def _mlp(self, layer: LayerSpec, x: torch.Tensor) -> torch.Tensor:
        inner = self._kernels.gated_linear(x, layer.gate, layer.up, self.spec.activation)
        return self._out_norm(self._kernels.linear(inner, layer.down), layer.mlp_out_norm)

    def _out_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return x if norm.kind is NormKind.NONE else self._kernels.add_norm(x, norm)
