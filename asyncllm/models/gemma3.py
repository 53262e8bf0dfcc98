"""Gemma 3, text: Llama's frame with four norms per layer, norms of the query and key heads, and two kinds of layers.

*Sliding* layers see a window of tokens and rotate by a base of their own; *full* layers see all tokens. Embeddings are
scaled, a norm's weight is stored as its distance from one, and the gate is a GELU.

Of a checkpoint that sees images too, the language model is taken and the rest is left out.

Source: transformers/models/gemma3/modeling_gemma3.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch

from asyncllm.errors import UnsupportedModelError
from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.layers.rotary import RotaryEmbedding, rope_parameters
from asyncllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaLayout, LlamaSettings
from asyncllm.models.settings import FULL, SLIDING, Count, check_layer_types

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.kernels.fused import Rotation
    from asyncllm.layers.linear import Destination, LinearMethod
    from asyncllm.loader import QuantizedTensor
    from asyncllm.models.base import ForwardContext

__all__ = ["Gemma3DecoderLayer", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"]

logger = logging.getLogger(__name__)

FULL_ROPE_THETA, LOCAL_ROPE_THETA = 1_000_000.0, 10_000.0  # of the configuration class
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


class Gemma3Settings(LlamaSettings, kw_only=True):
    """The part of ``config.json`` that shapes the model."""

    hidden_act: str = msgspec.field(name="hidden_activation")
    query_pre_attn_scalar: Annotated[float, msgspec.Meta(gt=0)]
    sliding_window: Count | None = None
    sliding_window_pattern: Count = 6
    """Every so many layers one sees all tokens; older files say this instead of ``layer_types``."""
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = False


def layer_types(settings: Gemma3Settings) -> list[str]:
    """Return the kind of each layer, ``FULL`` or ``SLIDING``.

    Raises as :func:`check_layer_types`.
    """
    period = settings.sliding_window_pattern
    kinds = settings.layer_types or [
        SLIDING if (index + 1) % period else FULL for index in range(settings.num_hidden_layers)
    ]
    return check_layer_types(kinds, settings.num_hidden_layers)


class Gemma3DecoderLayer(LlamaDecoderLayer):
    """Attention and MLP, each with a norm before it and one after it, before it is added to the residual stream."""

    def __init__(
        self, index: int, model: LlamaForCausalLM, layout: LlamaLayout, *, method: LinearMethod, **where: Any
    ) -> None:
        super().__init__(index, model, layout, method=method, **where)
        size, eps = model.settings.hidden_size, model.settings.rms_norm_eps
        self.pre_feedforward_layernorm = OffsetRMSNorm(size, eps, **where)
        self.post_feedforward_layernorm = OffsetRMSNorm(size, eps, **where)

    def forward(
        self, hidden: torch.Tensor, update: torch.Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> torch.Tensor:
        """Add ``update``, the last layer's result, to ``hidden`` [T, hidden] in place, and return this layer's."""
        update = self.self_attn(self.input_layernorm(hidden, update), rotation, context)
        update = self.post_attention_layernorm(update)
        update = self.mlp(self.pre_feedforward_layernorm(hidden, update))
        return self.post_feedforward_layernorm(update)

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes."""
        return {
            **super().destinations(name),
            **self.pre_feedforward_layernorm.destinations(f"{name}.pre_feedforward_layernorm"),
            **self.post_feedforward_layernorm.destinations(f"{name}.post_feedforward_layernorm"),
        }


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3 with its head. ``rotary`` is that of the full layers, ``local_rotary`` that of the sliding ones."""

    settings: Gemma3Settings
    settings_class = Gemma3Settings
    layer_class = Gemma3DecoderLayer
    norm_class = OffsetRMSNorm

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear_method: LinearMethod,
        max_position: int | None = None,
    ) -> None:
        config = checkpoint.text_config
        super().__init__(checkpoint, dtype=dtype, device=device, linear_method=linear_method, max_position=max_position)
        self.layer_types = layer_types(self.settings)
        local = config | {"rope_scaling": None, "rope_theta": config.get("rope_local_base_freq") or LOCAL_ROPE_THETA}
        self.local_rotary = RotaryEmbedding(
            self.head_dim, self.max_position, rope_parameters(local, SLIDING), dtype=dtype, device=device
        )
        self.embedding_scale = torch.tensor(self.settings.hidden_size**0.5, dtype=dtype).item()  # rounded so there too

    def rope_parameters(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the rotary parameters of the full layers."""
        return rope_parameters(config | {"rope_theta": config.get("rope_theta") or FULL_ROPE_THETA}, FULL)

    def layout(self, config: dict[str, Any]) -> LlamaLayout:
        """Return what ``config`` says about biases, windows and the scale of attention.

        :raises UnsupportedModelError: it asks for what Gemma 3 models do not have; names it.
        :raises CheckpointError: it names another number of layers than it has.
        """
        settings = self.settings
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(settings, name):
                raise UnsupportedModelError(f"{name}={getattr(settings, name)} is not supported", feature=name)
        window = settings.sliding_window
        return LlamaLayout(
            qkv_bias=settings.attention_bias,
            out_bias=settings.attention_bias,
            windows=[window if kind == SLIDING else None for kind in layer_types(settings)],
            head_norm=OffsetRMSNorm,
            attention_scale=settings.query_pre_attn_scalar**-0.5,
        )

    def rotary_of(self, index: int) -> RotaryEmbedding:
        """Return what rotates the heads of layer ``index``."""
        return self.local_rotary if self.layer_types[index] == SLIDING else self.rotary

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, hidden] of the flat batch ``token_ids`` [T] at ``positions`` [T] (int64)."""
        hidden = self.embed_tokens(token_ids).mul_(self.embedding_scale)  # [T, hidden]
        kind_to_rotation = {FULL: self.rotary(positions), SLIDING: self.local_rotary(positions)}
        update = None
        for kind, layer in zip(self.layer_types, self.layers, strict=True):
            update = layer(hidden, update, kind_to_rotation[kind], context)
        return self.norm(hidden, update)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The language model of a Gemma 3 that sees images too."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]]) -> None:
        """Take every tensor of the language model by its checkpoint name.

        :raises CheckpointError: a tensor is missing, unknown or of the wrong shape; names it.
        """
        logger.warning("this model takes text only: what it has for images is left out")
        super().load_weights(_text_weights(weights))


def _text_weights(
    weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]],
) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Yield the tensors of the language model under the names that they have without the rest.

    The two parts were nested in either order: ``language_model.model.`` and ``model.language_model.``.
    """
    for name, tensor in weights:
        inner = name.removeprefix("model.")
        if not inner.startswith(IMAGE_PARTS):
            yield inner.removeprefix("language_model."), tensor
