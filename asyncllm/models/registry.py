"""Which class runs an architecture, and how a model is built and loaded.

A family's module is imported when the first model of it is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from asyncllm.checkpoint import check_runnable
from asyncllm.errors import ModelError
from asyncllm.layers.linear import LinearMethod, prepare_linear_layers
from asyncllm.layers.linear_onednn import default_linear_method
from asyncllm.loader import iter_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from asyncllm.checkpoint import Checkpoint
    from asyncllm.models.base import CausalLM

__all__ = ["build_model", "known_architectures"]

ARCHITECTURE_TO_CLASS = {
    "Gemma3ForCausalLM": "asyncllm.models.gemma3.Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "asyncllm.models.gemma3.Gemma3ForConditionalGeneration",
    "LlamaForCausalLM": "asyncllm.models.llama.LlamaForCausalLM",
    "MistralForCausalLM": "asyncllm.models.llama.MistralForCausalLM",
    "OPTForCausalLM": "asyncllm.models.opt.OPTForCausalLM",
    "Qwen2ForCausalLM": "asyncllm.models.llama.Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "asyncllm.models.llama.Qwen3ForCausalLM",
}


class _Constructor(Protocol):
    def __call__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear_method: LinearMethod,
        max_position: int | None,
    ) -> CausalLM: ...


def known_architectures() -> list[str]:
    """Return the names of all architectures that can be built."""
    return sorted(ARCHITECTURE_TO_CLASS)


def build_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_position: int | None = None,
    linear_method: LinearMethod | None = None,
    report: Callable[[float], None] | None = None,
) -> CausalLM:
    """Return the model of ``checkpoint`` with its weights, in ``dtype`` on ``device``, ready for inference.

    ``max_position`` bounds the tables of positions where sequences will be shorter than the model allows.
    ``linear_method`` is how embeddings and linear layers keep and apply their weights, by default the fastest that
    torch brings for ``dtype`` and ``device``. ``report`` gets the loaded fraction of the weights' bytes, from 0 to 1.
    Peak memory is the model, in the form that its method keeps, plus its largest tensor.

    :raises UnsupportedModelError: the architecture, its quantization, or something in its configuration is not
    supported.
    :raises CheckpointError: configuration and weights contradict each other, or a file is damaged.
    """
    construct = find_class(checkpoint)
    method = linear_method or default_linear_method(dtype, device)
    try:
        model = construct(checkpoint, dtype=dtype, device=device, linear_method=method, max_position=max_position)
        model.load_weights(iter_weights(checkpoint, report))
    except ModelError as error:
        if error.model is None:  # raised by a block that does not know whose it is
            error.model = checkpoint.source
        raise
    prepare_linear_layers(model)
    return model.eval()


def find_class(checkpoint: Checkpoint) -> _Constructor:
    check_runnable(checkpoint)
    module_name, _, class_name = ARCHITECTURE_TO_CLASS[checkpoint.architecture].rpartition(".")
    return cast("_Constructor", getattr(importlib.import_module(module_name), class_name))
