"""The Llama family: RMSNorm before attention and MLP, rotary positions, grouped key/value heads, gated MLP.

Serves Llama 1 … 3.3, SmolLM 1 and 2 and whatever else is saved as ``LlamaForCausalLM``, and close relatives that differ
in which projections have a bias, in a sliding window and in norms of the query and key heads: Mistral, Qwen2 and Qwen3.
It is the frame of Gemma 3 too (:mod:`asyncllm.models.gemma3`).

Source: transformers/models/{llama,mistral,qwen2,qwen3}/modeling_*.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch
from torch import nn

from asyncllm.kernels.fused import HeadNorms, Rotation
from asyncllm.layers.activation import Gate
from asyncllm.layers.attention import Attention
from asyncllm.layers.embedding import Embedding
from asyncllm.layers.linear import Destination, Linear, LinearMethod
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.rotary import RotaryEmbedding, rope_parameters
from asyncllm.models.base import CausalLM, ForwardContext
from asyncllm.models.settings import FULL, SLIDING, Count, check_layer_types, read_settings
from asyncllm.models.weights import fill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.loader import QuantizedTensor

__all__ = [
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaLayout",
    "LlamaSettings",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
]


class LlamaSettings(msgspec.Struct, kw_only=True):
    """The part of ``config.json`` that shapes the model."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str
    max_position_embeddings: Count
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaLayout(msgspec.Struct, kw_only=True):
    """What differs between the members of the family."""

    qkv_bias: bool
    out_bias: bool
    windows: list[int | None]
    """Sliding window of each layer; ``None``: the layer sees all tokens."""
    head_norm: type[RMSNorm] | None = None
    """What normalises each query and key head before it is rotated."""
    attention_scale: float | None = None
    """``None``: one over the root of the head's size."""


class LlamaAttention(nn.Module):
    """Rotated, grouped self-attention with fused query, key and value projections."""

    def __init__(
        self, index: int, model: LlamaForCausalLM, layout: LlamaLayout, *, method: LinearMethod, **where: Any
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"method": method, **where}
        self.num_heads, self.head_dim = model.num_heads + 2 * model.num_kv_heads, model.head_dim
        q_size, kv_size = model.num_heads * self.head_dim, model.num_kv_heads * self.head_dim
        hidden_size, eps = model.settings.hidden_size, model.settings.rms_norm_eps
        self.qkv_proj = Linear(hidden_size, (q_size, kv_size, kv_size), bias=layout.qkv_bias, **how)
        self.o_proj = Linear(q_size, hidden_size, bias=layout.out_bias, **how)
        self.q_norm = layout.head_norm(self.head_dim, eps, **where) if layout.head_norm is not None else None
        self.k_norm = layout.head_norm(self.head_dim, eps, **where) if layout.head_norm is not None else None
        scale = self.head_dim**-0.5 if layout.attention_scale is None else layout.attention_scale
        self.attention = Attention(index, scale=scale, window=layout.windows[index])

    def forward(self, hidden: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """Return the layer's attention output for ``hidden`` [T, hidden], [T, hidden]."""
        heads = self.qkv_proj(hidden).view(hidden.shape[0], self.num_heads, self.head_dim)  # [T, H + 2 * KV, D]
        return self.o_proj(self.attention.rotated(heads, rotation, context, self._head_norms()))

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        found = {
            **self.qkv_proj.destinations(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            **self.o_proj.destinations(f"{name}.o_proj"),
        }
        if self.q_norm is not None and self.k_norm is not None:
            found |= self.q_norm.destinations(f"{name}.q_norm") | self.k_norm.destinations(f"{name}.k_norm")
        return found


class LlamaMLP(nn.Module):
    """Gated MLP with fused gate and up projections."""

    def __init__(self, settings: LlamaSettings, **how: Any) -> None:
        super().__init__()
        size = settings.intermediate_size
        self.gate_up_proj = Linear(settings.hidden_size, (size, size), bias=settings.mlp_bias, **how)
        self.down_proj = Linear(size, settings.hidden_size, bias=settings.mlp_bias, **how)
        self.gate = Gate(settings.hidden_act, how["device"])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output for ``hidden`` [T, hidden], [T, hidden]."""
        return self.down_proj(self.gate(self.gate_up_proj(hidden)))

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        return {
            **self.gate_up_proj.destinations(f"{name}.gate_proj", f"{name}.up_proj"),
            **self.down_proj.destinations(f"{name}.down_proj"),
        }


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream.

    What either computes is added to the stream in place by the next norm, which is the next layer's after the MLP.
    """

    def __init__(
        self, index: int, model: LlamaForCausalLM, layout: LlamaLayout, *, method: LinearMethod, **where: Any
    ) -> None:
        super().__init__()
        settings, norm = model.settings, model.norm_class
        self.input_layernorm = norm(settings.hidden_size, settings.rms_norm_eps, **where)
        self.self_attn = LlamaAttention(index, model, layout, method=method, **where)
        self.post_attention_layernorm = norm(settings.hidden_size, settings.rms_norm_eps, **where)
        self.mlp = LlamaMLP(settings, method=method, **where)

    def forward(
        self, hidden: torch.Tensor, update: torch.Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """Add ``update``, the last layer's result, to ``hidden`` [T, hidden] in place, and return this layer's."""
        update = self.self_attn(self.input_layernorm(hidden, update), rotation, context)
        return self.mlp(self.post_attention_layernorm(hidden, update))

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        return {
            **self.input_layernorm.destinations(f"{name}.input_layernorm"),
            **self.self_attn.destinations(f"{name}.self_attn"),
            **self.post_attention_layernorm.destinations(f"{name}.post_attention_layernorm"),
            **self.mlp.destinations(f"{name}.mlp"),
        }


class LlamaForCausalLM(CausalLM):
    """Llama, and the frame of its relatives, which override :meth:`layout` and, where more differs, these classes."""

    settings_class: ClassVar[type[LlamaSettings]] = LlamaSettings
    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

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
        self.settings = settings = read_settings(checkpoint, self.settings_class)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        how: dict[str, Any] = {"method": linear_method, **where}
        self._set_shape(checkpoint, max_position)
        layout = self.layout(checkpoint.text_config)
        self.embed_tokens = Embedding(settings.vocab_size, settings.hidden_size, **how)
        parameters = self.rope_parameters(checkpoint.text_config)
        self.rotary = RotaryEmbedding(self.head_dim, self.max_position, parameters, **where)
        self.layers = nn.ModuleList(
            self.layer_class(index, self, layout, **how) for index in range(settings.num_hidden_layers)
        )
        self.norm = self.norm_class(settings.hidden_size, settings.rms_norm_eps, **where)
        self.lm_head = Linear(settings.hidden_size, settings.vocab_size, bias=False, **how)
        if settings.tie_word_embeddings:
            self.lm_head.tie(self.embed_tokens)

    def _set_shape(self, checkpoint: Checkpoint, max_position: int | None) -> None:
        settings = self.settings
        self.num_layers = settings.num_hidden_layers
        self.num_heads = settings.num_attention_heads
        self.num_kv_heads = settings.num_key_value_heads or self.num_heads
        self.head_dim = settings.head_dim or settings.hidden_size // self.num_heads
        self.vocab_size = settings.vocab_size
        self.max_position = min(max_position or settings.max_position_embeddings, settings.max_position_embeddings)
        if self.num_heads % self.num_kv_heads:
            heads = f"{self.num_heads} attention heads and {self.num_kv_heads} key/value heads"
            raise checkpoint.damaged(f"has {heads}; the first must be a multiple of the second")

    def layout(self, config: dict[str, Any]) -> LlamaLayout:
        """Return what ``config`` says about biases and windows."""
        bias = self.settings.attention_bias
        return LlamaLayout(qkv_bias=bias, out_bias=bias, windows=[None] * self.num_layers)

    def rope_parameters(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of :attr:`rotary`."""
        return rope_parameters(config)

    def rotary_of(self, index: int) -> RotaryEmbedding:
        """Return what rotates the heads of layer ``index``."""
        return self.rotary

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        """Take every tensor by its checkpoint name.

        :raises CheckpointError: a tensor is missing, unknown or of the wrong shape; names it.
        """
        tied = self.settings.tie_word_embeddings
        fill(self.destinations(), weights, optional=frozenset(["lm_head.weight"] if tied else []))

    def destinations(self) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        found = self.embed_tokens.destinations("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            found.update(layer.destinations(f"model.layers.{index}"))
        found.update(self.norm.destinations("model.norm"))
        if not self.settings.tie_word_embeddings:
            found.update(self.lm_head.destinations("lm_head"))
        return found

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, hidden] of the flat batch ``token_ids`` [T] at ``positions`` [T] (int64)."""
        hidden = self.embed_tokens(token_ids)  # [T, hidden]
        rotation = self.rotary(positions)
        update = None
        for layer in self.layers:
            update = layer(hidden, update, rotation, context)
        return self.norm(hidden, update)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size] for the rows of ``hidden`` [R, hidden] that sample."""
        return self.lm_head(hidden).float()


class MistralSettings(LlamaSettings, kw_only=True):
    """Llama's, and the window."""

    sliding_window: Count | None = None


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window in every layer, where the configuration has one; no biases."""

    settings: MistralSettings
    settings_class = MistralSettings

    def layout(self, config: dict[str, Any]) -> LlamaLayout:
        """Return what ``config`` says about biases and windows."""
        return LlamaLayout(qkv_bias=False, out_bias=False, windows=[self.settings.sliding_window] * self.num_layers)


class Qwen2Settings(MistralSettings, kw_only=True):
    """Llama's, and which layers have the window."""

    use_sliding_window: bool = False
    max_window_layers: int = 28
    """Layers before this one see all tokens, unless ``layer_types`` says which do."""
    layer_types: list[str] | None = None


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases on query, key and value, and a sliding window in those layers that the configuration names."""

    settings: Qwen2Settings
    settings_class = Qwen2Settings

    def layout(self, config: dict[str, Any]) -> LlamaLayout:
        """Return what ``config`` says about biases and windows."""
        return LlamaLayout(qkv_bias=True, out_bias=False, windows=self._windows())

    def _windows(self) -> list[int | None]:
        settings = self.settings
        window = settings.sliding_window if settings.use_sliding_window else None
        kinds = settings.layer_types or [
            SLIDING if index >= settings.max_window_layers else FULL for index in range(self.num_layers)
        ]
        return [window if kind == SLIDING else None for kind in check_layer_types(kinds, self.num_layers)]


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a norm of each query and key head; biases only where the configuration says so."""

    def layout(self, config: dict[str, Any]) -> LlamaLayout:
        """Return what ``config`` says about biases and windows."""
        bias = self.settings.attention_bias
        return LlamaLayout(qkv_bias=bias, out_bias=bias, windows=self._windows(), head_norm=RMSNorm)
