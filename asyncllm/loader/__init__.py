"""The weights of a checkpoint as a stream of named tensors, from memory maps: one tensor at a time, never all of them.

Names are those of Hugging Face files, whatever the format; :meth:`asyncllm.models.base.CausalLM.load_weights` takes the
stream. A tensor is valid until the next one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.loader import folder, gguf
from asyncllm.loader.dequantize import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from asyncllm.checkpoint import Checkpoint

__all__ = ["QuantizedTensor", "iter_weights"]


def iter_weights(
    checkpoint: Checkpoint, report: Callable[[float], None] | None = None
) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Yield every tensor of ``checkpoint`` on the CPU by its Hugging Face name.

    All come as they are stored, so that whoever keeps them converts them once, if at all: matrices of a quantized type
    as :class:`QuantizedTensor`, everything else as a tensor of its own dtype.
    ``report`` gets the fraction of the weights' bytes that was taken, from 0 to 1.

    :raises UnsupportedModelError: a tensor type, or the file format of the weights, is not one that we read.
    :raises CheckpointError: a file is missing or damaged; names it.
    """
    tensors = folder.iter_folder(checkpoint) if checkpoint.gguf is None else gguf.iter_gguf(checkpoint)
    for name, tensor, fraction in tensors:
        yield name, tensor
        if report is not None:
            report(fraction)
