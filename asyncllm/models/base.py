"""What every model family gives the runner, and what it gets in a forward pass.

A family is one file with modules in reading order. It is constructed from the checkpoint's ``config.json`` (a
GGUF file's metadata is brought to the same form by :mod:`asyncllm.checkpoint`), then takes its weights by name, one
at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from asyncllm.attention.base import AttentionBackend, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.kernels.base import DrawnTokens
    from asyncllm.loader import QuantizedTensor

__all__ = ["CausalLM", "ForwardContext", "StepModel"]


@dataclass(kw_only=True)
class ForwardContext:
    """The step, as the attention layers see it: passed down explicitly, so that nothing is global."""

    backend: AttentionBackend
    plan: Any
    kv_caches: list[KVCache]


class StepModel(Protocol):
    """What the runner calls once per step: a :class:`CausalLM`, or its layers as one native call."""

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, hidden] of the flat batch; see :meth:`CausalLM.forward`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size]; see :meth:`CausalLM.compute_logits`."""
        ...

    def greedy_tokens(self, hidden: torch.Tensor, vocab_size: int) -> DrawnTokens | None:
        """Return the greatest logit among the first ``vocab_size`` for rows of ``hidden`` [R, hidden], and its token.

        No logits are kept for it. ``None``: the model has only :meth:`compute_logits`.
        """
        ...


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over a flat batch of tokens.

    After construction these attributes are set: ``num_layers``, ``num_heads``, ``num_kv_heads``, ``head_dim``,
    ``vocab_size``, ``max_position`` (longest sequence that the positions cover).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        """Take every tensor by its checkpoint name.

        What is kept as a parameter is dequantized and cast to the model's dtype.

        :raises CheckpointError: a tensor is missing, unknown or of the wrong shape; names it.
        """

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, hidden] of the flat batch ``token_ids`` [T] at ``positions`` [T] (int64)."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size] for the rows of ``hidden`` [R, hidden] that sample."""

    def greedy_tokens(self, hidden: torch.Tensor, vocab_size: int) -> DrawnTokens | None:
        """Return nothing: torch has no head that keeps no logits."""
        return None
