"""Activations by their name in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm.errors import UnsupportedModelError

__all__ = ["Activation", "get_activation"]

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


NAME_TO_ACTIVATION: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def get_activation(name: str) -> Activation:
    """Return the elementwise function that a configuration calls ``name``.

    :raises UnsupportedModelError: it is not one of ours.
    """
    activation = NAME_TO_ACTIVATION.get(name)
    if activation is None:
        known = ", ".join(sorted(NAME_TO_ACTIVATION))
        raise UnsupportedModelError(
            f"the activation {name!r} is not supported; known are {known}", feature=f"activation {name}"
        )
    return activation
