"""How arrays that the host makes for the sampler reach the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

__all__ = ["Upload"]


class Upload(Protocol):
    """Returns an array as a tensor on the device, without waiting for it; the array must not change afterwards."""

    def __call__(self, array: npt.NDArray[Any], /) -> torch.Tensor:
        """Return ``array`` on the device."""
        ...
