"""A loaded model as one native call per step: its modules become a :class:`~asyncllm.kernels.decoder.DecoderSpec`.

The model must keep its weights by :class:`~asyncllm.layers.linear_native.NativeLinearMethod`
(``build_model(..., linear_method=NativeLinearMethod(kernels))``); the description points at what that packed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from asyncllm.errors import UnsupportedModelError
from asyncllm.kernels.base import Activation, DrawnTokens, Format, Norm, NormKind, Rotary
from asyncllm.kernels.decoder import DecoderSpec, LayerSpec
from asyncllm.layers.linear_native import packed_parts
from asyncllm.layers.norm import LayerNorm, RMSNorm
from asyncllm.models.gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM
from asyncllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from asyncllm.models.opt import POSITION_OFFSET, OPTDecoderLayer, OPTForCausalLM

if TYPE_CHECKING:
    import torch
    from torch import nn

    from asyncllm.kernels.base import Kernels
    from asyncllm.layers.rotary import RotaryEmbedding
    from asyncllm.models.base import CausalLM, ForwardContext

__all__ = ["NativeModel", "describe"]

NO_ROWS = np.zeros(0, np.int32)

NAME_TO_ACTIVATION = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


class NativeModel:
    """All layers of a loaded model as one native call per step, and the head as another.

    Steps need the plan and the caches of
    :class:`asyncllm.attention.native.NativeAttention`.

    :raises UnsupportedModelError: see :func:`describe`.
    """

    def __init__(self, model: CausalLM, kernels: Kernels, *, block_size: int, kv_format: Format = Format.F32) -> None:
        self._kernels = kernels
        self._spec = describe(model, block_size=block_size, kv_format=kv_format)
        self._decoder = kernels.make_decoder(self._spec)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return final hidden states [T, hidden] of the flat batch; its positions are those of the plan."""
        batch = context.plan._replace(token_ids=token_ids.numpy())
        output = self._decoder.step(
            batch, context.kv_caches, NO_ROWS, with_hidden=True, with_logits=False, with_best=False
        )
        assert output.hidden is not None
        return output.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, vocab_size]."""
        return self._kernels.linear(hidden, self._spec.head)

    def greedy_tokens(self, hidden: torch.Tensor, vocab_size: int) -> DrawnTokens:
        """Return the greatest logit of each row among the first ``vocab_size``, and its token."""
        head = self._spec.head
        if head.n != vocab_size:  # rows beyond the vocabulary are padding
            head = dataclasses.replace(head, n=vocab_size)
        best, best_logits, _ = self._kernels.head(hidden, head, with_logits=False)
        return DrawnTokens(best, best_logits)


def describe(model: CausalLM, *, block_size: int, kv_format: Format = Format.F32) -> DecoderSpec:
    """Return ``model`` as the kernels that packed its weights run it.

    :raises UnsupportedModelError: its family or one of its functions is not among those that the native step knows.
    """
    if isinstance(model, LlamaForCausalLM):
        return describe_llama(model, block_size, kv_format)
    if isinstance(model, OPTForCausalLM):
        return describe_opt(model, block_size, kv_format)
    name = type(model).__name__
    raise UnsupportedModelError(f"{name} has no native step", feature=name)


def describe_llama(model: LlamaForCausalLM, block_size: int, kv_format: Format) -> DecoderSpec:
    """Return Llama and its relatives, Gemma 3 included."""
    rotaries: dict[RotaryEmbedding, Rotary] = {}  # layers share them
    layers: list[LayerSpec] = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, LlamaDecoderLayer)
        module = model.rotary_of(index)
        if module not in rotaries:
            table = module.table.float()
            rotaries[module] = Rotary(cos=table[:, 0].contiguous(), sin=table[:, 1].contiguous())
        layers.append(describe_llama_layer(layer, rotaries[module]))
    (embedding,), (head,) = packed_parts(model.embed_tokens), packed_parts(model.lm_head)
    return DecoderSpec(
        hidden_size=model.settings.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        kv_format=kv_format,
        activation=activation_of(model.settings.hidden_act),
        embedding=embedding,
        embedding_scale=model.embedding_scale if isinstance(model, Gemma3ForCausalLM) else 1.0,
        layers=layers,
        final_norm=norm_of(model.norm),
        head=head,
    )


def describe_llama_layer(layer: LlamaDecoderLayer, rotary: Rotary) -> LayerSpec:
    """Return one layer of :func:`describe_llama`."""
    attention = layer.self_attn
    q, k, v = packed_parts(attention.qkv_proj)
    gate, up = packed_parts(layer.mlp.gate_up_proj)
    (o,), (down,) = packed_parts(attention.o_proj), packed_parts(layer.mlp.down_proj)
    norms = {"mlp_norm": norm_of(layer.post_attention_layernorm)}
    if isinstance(layer, Gemma3DecoderLayer):
        norms = {
            "attention_out_norm": norm_of(layer.post_attention_layernorm),
            "mlp_norm": norm_of(layer.pre_feedforward_layernorm),
            "mlp_out_norm": norm_of(layer.post_feedforward_layernorm),
        }
    return LayerSpec(
        attention_norm=norm_of(layer.input_layernorm),
        q=q,
        k=k,
        v=v,
        q_norm=norm_of(attention.q_norm),
        k_norm=norm_of(attention.k_norm),
        o=o,
        gate=gate,
        up=up,
        down=down,
        rotary=rotary,
        attention_scale=attention.attention.scale,
        window=attention.attention.window,
        **norms,
    )


def describe_opt(model: OPTForCausalLM, block_size: int, kv_format: Format) -> DecoderSpec:
    """Return OPT in both of its shapes."""
    layers: list[LayerSpec] = []
    for layer in model.layers:
        assert isinstance(layer, OPTDecoderLayer)
        q, k, v = packed_parts(layer.qkv_proj)
        (o,), (up,), (down,) = (packed_parts(part) for part in (layer.out_proj, layer.fc1, layer.fc2))
        layers.append(
            LayerSpec(
                attention_norm=norm_of(layer.self_attn_layer_norm),
                q=q,
                k=k,
                v=v,
                o=o,
                mlp_norm=norm_of(layer.final_layer_norm),
                up=up,
                down=down,
                attention_scale=layer.attention.scale,
            )
        )
    (embedding,), (head,) = packed_parts(model.embed_tokens), packed_parts(model.lm_head)
    return DecoderSpec(
        hidden_size=model.settings.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        kv_format=kv_format,
        activation=activation_of(model.settings.activation_function),
        post_norm=not model.settings.do_layer_norm_before,
        embedding=embedding,
        position_embedding=model.embed_positions.weight.detach().float().contiguous(),
        position_offset=POSITION_OFFSET,
        project_in=packed_parts(model.project_in)[0] if model.project_in is not None else None,
        project_out=packed_parts(model.project_out)[0] if model.project_out is not None else None,
        layers=layers,
        final_norm=norm_of(model.final_layer_norm),
        head=head,
    )


def norm_of(module: RMSNorm | LayerNorm | None) -> Norm:
    """Return the norm that ``module`` applies."""
    if module is None:
        return Norm()
    kind = NormKind.RMS if isinstance(module, RMSNorm) else NormKind.LAYER
    bias = module.bias if isinstance(module, LayerNorm) else None
    return Norm(kind=kind, weight=as_float32(module.weight), bias=as_float32(bias), eps=module.eps)


def as_float32(weight: nn.Parameter | None) -> torch.Tensor | None:
    """Return a weight of a norm as the kernels take it."""
    return None if weight is None else weight.detach().float().contiguous()


def activation_of(name: str) -> Activation:
    """Return the activation that a configuration calls ``name``.

    :raises UnsupportedModelError: the native step does not know it.
    """
    if name not in NAME_TO_ACTIVATION:
        raise UnsupportedModelError(f"the native step does not know the activation {name!r}", feature=name)
    return NAME_TO_ACTIVATION[name]
