"""The attention layer: hands the flat batch of a layer to the :class:`~asyncllm.attention.base.AttentionBackend`.

The backend, its plan and the KV blocks come with each call in the :class:`~asyncllm.models.base.ForwardContext`; the
layer knows only which of the caches is its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from asyncllm.kernels.fused import HeadNorms, Rotation
    from asyncllm.models.base import ForwardContext

__all__ = ["Attention"]


class Attention:
    """Causal attention of layer ``layer_index``: no weights, no state."""

    def __init__(self, layer_index: int, *, scale: float, window: int | None = None) -> None:
        self.layer_index = layer_index
        self.scale = scale
        self.window = window

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` [T, KV, D] and return the attention of ``query`` [T, H, D], as [T, H * D].

        The three may be strided views, with the last dimension contiguous.
        """
        cache = context.kv_caches[self.layer_index]
        context.backend.write_kv(key, value, cache, context.plan)
        return context.backend.forward(query, cache, context.plan, scale=self.scale, window=self.window)

    def rotated(
        self, heads: torch.Tensor, rotation: Rotation, context: ForwardContext, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        """Return attention as :meth:`__call__` does, [T, H * D], of heads that are normalised and rotated first.

        ``heads`` [T, H + 2 * KV, D] are query, key and value heads, contiguous in each token.
        """
        cache = context.kv_caches[self.layer_index]
        query = context.backend.rotate_and_write(heads, rotation, cache, context.plan, norms)
        return context.backend.forward(query, cache, context.plan, scale=self.scale, window=self.window)
