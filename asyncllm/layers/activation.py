"""Activations by their name in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm.errors import UnsupportedModelError

__all__ = ["Activation", "apply_gated", "get_activation"]

Activation = Callable[[torch.Tensor], torch.Tensor]


SERIAL_ELEMENTS = 32_768
"""torch runs an elementwise operation on fewer numbers than this in one piece (``at::internal::GRAIN_SIZE``)."""


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


def apply_gated(activation: Activation, gate_up: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``activation(gate) * up`` [T, size] of ``gate_up`` [T, 2 * size].

    A token's result does not depend on how many there are. On a CPU, torch cuts long tensors into equal pieces for its
    threads, in the middle of a row, and computes the numbers at the end of a piece by another formula; so long ones are
    cut into whole rows here. They then run on one thread: about 1 % of the time of the layer's matrix products.
    """
    num_rows = gate_up.shape[0]
    most = max(1, (SERIAL_ELEMENTS - 1) // size)
    if num_rows <= most or gate_up.device.type != "cpu":
        return activation(gate_up[:, :size]).mul_(gate_up[:, size:])
    out = torch.empty(num_rows, size, dtype=gate_up.dtype)
    for start in range(0, num_rows, most):
        part = gate_up[start : start + most]
        torch.mul(activation(part[:, :size]), part[:, size:], out=out[start : start + most])
    return out
