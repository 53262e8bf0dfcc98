"""Activations by their name in a configuration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncllm.errors import UnsupportedModelError
from asyncllm.kernels.fused import NAME_TO_ACTIVATION, fused_kernels

__all__ = ["Activation", "Gate", "get_activation"]

Activation = Callable[[torch.Tensor], torch.Tensor]


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


class Gate:
    """The gate of an MLP: no weights, no state.

    :raises UnsupportedModelError: the activation ``name`` is not one of ours.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        get_activation(name)
        self._name = name
        self._kernels = fused_kernels(device)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``activation(gate) * up`` [T, size] of ``gate_up`` [T, 2 * size]."""
        return self._kernels.gate(gate_up, self._name)
