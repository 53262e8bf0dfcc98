"""The weights of a checkpoint as a stream of named tensors, from memory maps: one tensor at a time, never all of them.

Names are those of Hugging Face files, whatever the format; :meth:`asyncllm.models.base.CausalLM.load_weights` takes the
stream. A tensor is valid until the next one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.loader import folder, gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from asyncllm.checkpoint import Checkpoint

__all__ = ["iter_weights"]


def iter_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, report: Callable[[float], None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``checkpoint`` on the CPU by its Hugging Face name.

    Quantized ones come in ``dtype``, the others as they are stored: copying them to their place casts them, once.
    ``report`` gets the fraction of the weights' bytes that was taken, from 0 to 1.

    :raises UnsupportedModelError: a tensor type, or the file format of the weights, is not one that we read.
    :raises CheckpointError: a file is missing or damaged; names it.
    """
    tensors = folder.iter_folder(checkpoint) if checkpoint.gguf is None else gguf.iter_gguf(checkpoint, dtype)
    for name, tensor, fraction in tensors:
        yield name, tensor
        if report is not None:
            report(fraction)
