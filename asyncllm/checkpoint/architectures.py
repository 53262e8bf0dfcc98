"""Which architectures the workers of this package run, by name, so that a caller's process can tell without torch.

Not here: the classes that run them (:mod:`asyncllm.models.registry`; a test holds the two lists together).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from asyncllm.checkpoint.checkpoint import Checkpoint

__all__ = ["ARCHITECTURES", "check_runnable"]

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def check_runnable(checkpoint: Checkpoint) -> None:
    """Return if the architecture is one of ours, and its weights are not quantized in a way that we do not read.

    :raises UnsupportedModelError: it is not; says what is.
    """
    name = checkpoint.architecture
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise checkpoint.unsupported(
            f"has the architecture {name!r}, which is not among those that we run: {known}", feature=name
        )
    quantization: Any = checkpoint.config.get("quantization_config")
    if quantization:
        method = cast("dict[str, Any]", quantization).get("quant_method", "unknown")
        raise checkpoint.unsupported(
            f"is quantized with {method!r}; of quantized files only GGUF is read", feature=method
        )
