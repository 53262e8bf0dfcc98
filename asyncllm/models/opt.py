"""OPT (Zhang et al. 2022): learned positions, LayerNorm before or after each block, ReLU MLP, biases, tied head.

Two shapes exist: opt-125m and most others normalise before each block and once at the end; opt-350m normalises after
each block, has no norm at the end, and embeds tokens in a narrower space (``word_embed_proj_dim``) with a projection
in and out.

Source: transformers/models/opt/modeling_opt.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from asyncllm.layers.activation import get_activation
from asyncllm.layers.attention import Attention
from asyncllm.layers.embedding import Embedding, LearnedPositions
from asyncllm.layers.linear import Destination, Linear, LinearMethod
from asyncllm.layers.norm import LayerNorm
from asyncllm.models.base import CausalLM, ForwardContext
from asyncllm.models.settings import Count, read_settings
from asyncllm.models.weights import fill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.loader import QuantizedTensor

__all__ = ["OPTForCausalLM"]

POSITION_OFFSET = 2
"""The first two rows of the position table were made for padding."""


class OPTSettings(msgspec.Struct, kw_only=True):
    """The part of ``config.json`` that shapes the model."""

    vocab_size: Count
    hidden_size: Count
    ffn_dim: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    word_embed_proj_dim: Count | None = None
    do_layer_norm_before: bool
    remove_final_layer_norm: bool = msgspec.field(name="_remove_final_layer_norm")
    activation_function: str
    enable_bias: bool
    layer_norm_elementwise_affine: bool
    tie_word_embeddings: bool


class OPTDecoderLayer(nn.Module):
    """Attention and MLP, each normalised before or after it is added to the residual stream."""

    def __init__(self, index: int, settings: OPTSettings, *, method: LinearMethod, **where: Any) -> None:
        super().__init__()
        size, bias, affine = settings.hidden_size, settings.enable_bias, settings.layer_norm_elementwise_affine
        how: dict[str, Any] = {"method": method, **where}
        self.norm_before = settings.do_layer_norm_before
        self.num_heads = settings.num_attention_heads
        self.head_dim = size // self.num_heads
        self.self_attn_layer_norm = LayerNorm(size, affine=affine, **where)
        self.qkv_proj = Linear(size, (size, size, size), bias=bias, **how)
        self.attention = Attention(index, scale=self.head_dim**-0.5)
        self.out_proj = Linear(size, size, bias=bias, **how)
        self.final_layer_norm = LayerNorm(size, affine=affine, **where)
        self.fc1 = Linear(size, settings.ffn_dim, bias=bias, **how)
        self.activation = get_activation(settings.activation_function)
        self.fc2 = Linear(settings.ffn_dim, size, bias=bias, **how)

    def forward(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return the residual stream after this layer; ``hidden`` [T, hidden] is changed."""
        if self.norm_before:
            hidden.add_(self._attend(self.self_attn_layer_norm(hidden), context))
            return hidden.add_(self._mlp(self.final_layer_norm(hidden)))
        hidden = self.self_attn_layer_norm(hidden.add_(self._attend(hidden, context)))
        return self.final_layer_norm(hidden.add_(self._mlp(hidden)))

    def _attend(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], 3, self.num_heads, self.head_dim)
        return self.out_proj(self.attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], context))

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(hidden)))

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        attention = f"{name}.self_attn"
        return {
            **self.qkv_proj.destinations(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            **self.out_proj.destinations(f"{attention}.out_proj"),
            **self.self_attn_layer_norm.destinations(f"{name}.self_attn_layer_norm"),
            **self.fc1.destinations(f"{name}.fc1"),
            **self.fc2.destinations(f"{name}.fc2"),
            **self.final_layer_norm.destinations(f"{name}.final_layer_norm"),
        }


class OPTForCausalLM(CausalLM):
    """OPT with its head."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear_method: LinearMethod,
        max_position: int | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings = read_settings(checkpoint, OPTSettings)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        how: dict[str, Any] = {"method": linear_method, **where}
        self._set_shape(checkpoint, max_position)
        size = settings.hidden_size
        embed_size = settings.word_embed_proj_dim or size
        self.embed_tokens = Embedding(settings.vocab_size, embed_size, **how)
        self.embed_positions = LearnedPositions(settings.max_position_embeddings, size, POSITION_OFFSET, **where)
        projected = embed_size != size
        self.project_in = Linear(embed_size, size, bias=False, **how) if projected else None
        self.project_out = Linear(size, embed_size, bias=False, **how) if projected else None
        self.layers = nn.ModuleList(
            OPTDecoderLayer(index, settings, **how) for index in range(settings.num_hidden_layers)
        )
        normed = settings.do_layer_norm_before and not settings.remove_final_layer_norm
        affine = settings.layer_norm_elementwise_affine
        self.final_layer_norm = LayerNorm(size, affine=affine, **where) if normed else None
        self.lm_head = Linear(embed_size, settings.vocab_size, bias=False, **how)
        if settings.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)

    def _set_shape(self, checkpoint: Checkpoint, max_position: int | None) -> None:
        settings = self.settings
        self.num_layers = settings.num_hidden_layers
        self.num_heads = self.num_kv_heads = settings.num_attention_heads
        self.head_dim = settings.hidden_size // self.num_heads
        self.vocab_size = settings.vocab_size
        self.max_position = min(max_position or settings.max_position_embeddings, settings.max_position_embeddings)
        if self.head_dim * self.num_heads != settings.hidden_size:
            sizes = f"hidden_size {settings.hidden_size} and {self.num_heads} attention heads"
            raise checkpoint.damaged(f"has {sizes}; the first must be a multiple of the second")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        """Take every tensor by its checkpoint name.

        :raises CheckpointError: a tensor is missing, unknown or of the wrong shape; names it.
        """
        tied = self.settings.tie_word_embeddings
        fill(self.destinations(), weights, optional=frozenset(["lm_head.weight"] if tied else []))

    def destinations(self) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        decoder = "model.decoder"
        found = self.embed_tokens.destinations(f"{decoder}.embed_tokens")
        found.update(self.embed_positions.destinations(f"{decoder}.embed_positions"))
        if self.project_in is not None and self.project_out is not None:
            found.update(self.project_in.destinations(f"{decoder}.project_in"))
            found.update(self.project_out.destinations(f"{decoder}.project_out"))
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, OPTDecoderLayer)
            found.update(layer.destinations(f"{decoder}.layers.{index}"))
        if self.final_layer_norm is not None:
            found.update(self.final_layer_norm.destinations(f"{decoder}.final_layer_norm"))
        if not self.settings.tie_word_embeddings:
            found.update(self.lm_head.destinations("lm_head"))
        return found

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, embed] of the flat batch ``token_ids`` [T] at ``positions`` [T] (int64)."""
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden.add_(self.embed_positions(positions))  # [T, hidden]
        for layer in self.layers:
            hidden = layer(hidden, context)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size] for the rows of ``hidden`` [R, embed] that sample."""
        return self.lm_head(hidden).float()
