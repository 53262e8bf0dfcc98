"""Filling a model from a stream of named tensors, each checked and taken once.

Invariant: after :func:`fill` every destination got its tensor exactly once; anything missing, unknown or of another
shape is an error that names the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from asyncllm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncllm.layers.linear import Destination
    from asyncllm.loader import QuantizedTensor

__all__ = ["fill"]

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers that older versions of transformers saved; computed here."""


def fill(
    destinations: Mapping[str, Destination],
    weights: Iterable[tuple[str, torch.Tensor | QuantizedTensor]],
    *,
    optional: frozenset[str] = frozenset(),
) -> None:
    """Give every tensor of ``weights`` to its destination; memory gets it dequantized and cast to its own dtype.

    A checkpoint saved without the head names its tensors without the leading ``model.``; both forms are taken. Tensors
    named in ``optional`` may be there, and are not read: the copy of a tied head, for one.

    :raises CheckpointError: a tensor is missing, unknown, there twice, or of the wrong shape; names it.
    """
    waiting = dict(destinations)
    for name, tensor in weights:
        target = name if name in destinations else f"model.{name}"
        if target not in destinations:
            if name in optional or target in optional or name.endswith(IGNORED_SUFFIXES):
                continue
            raise CheckpointError(f"the checkpoint has a tensor {name!r} that this architecture does not have")
        destination = waiting.pop(target, None)
        if destination is None:
            raise CheckpointError(f"the checkpoint has the tensor {target!r} twice")
        found, expected = tuple(tensor.shape), tuple(destination.shape)
        if found != expected:
            raise CheckpointError(f"tensor {name!r} has the shape {found}; the configuration makes it {expected}")
        if not isinstance(destination, torch.Tensor):
            destination.take(tensor)
        elif isinstance(tensor, torch.Tensor):
            destination.copy_(tensor)
        else:
            destination.copy_(tensor.dequantize(destination.dtype))
    if waiting:
        first, *others = waiting
        more = f" and {len(others)} more" if others else ""
        raise CheckpointError(f"the checkpoint lacks the tensor {first!r}{more}")
