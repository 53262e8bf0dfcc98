"""Linear layers on a CPU in float32, with weights packed by oneDNN as it comes with torch.

Two reasons over ``torch.nn.functional.linear``, which calls MKL: a few rows cost little more than one, and a row's
result is the same bit for bit however many rows there are, while MKL takes other code for one, two and three rows.
Measured on Zen 5, two threads, [rows, 576] x [576, 3072]: 1, 8 and 32 rows in 92, 378 and 1253 us, against 93, 1128
and 3509 us.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncllm.layers.linear import Linear, LinearMethod, TorchLinearMethod

__all__ = ["OneDNNLinearMethod", "default_linear_method"]


class OneDNNLinearMethod(TorchLinearMethod):
    """Packed weights in place of the loaded ones; embeddings as they were loaded."""

    def __init__(self) -> None:
        operators: Any = torch.ops.mkldnn
        self._pack: Any = operators._reorder_linear_weight.default
        self._multiply: Any = operators._linear_pointwise.default

    @classmethod
    def why_not(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """Return why this method cannot serve a model in ``dtype`` on ``device``, ``None`` if it can."""
        if device.type != "cpu" or dtype != torch.float32:
            return f"it serves float32 on a CPU, not {dtype} on {device.type}"
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        operators: Any = torch.ops.mkldnn
        names = ("_reorder_linear_weight", "_linear_pointwise")
        absent = [name for name in names if not hasattr(operators, name)]
        return f"this torch lacks the operator mkldnn::{absent[0]}" if absent else None

    def prepare(self, layer: Linear) -> None:
        """Pack the weight and drop the loaded one.

        For some shapes and processors oneDNN too takes other code for a single row; where a trial shows that, a single
        row is computed as one of two, at the same cost.
        """
        packed = self._pack(layer.weight.detach(), None)
        trial = torch.randn(2, layer.in_size, generator=torch.Generator().manual_seed(0))
        alone, paired = (self._multiply(x, packed, None, "none", [], "") for x in (trial[:1], trial))
        layer.prepared = (packed, not torch.equal(alone, paired[:1]))
        layer.drop_weight()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        packed, pair_single_row = layer.prepared
        if pair_single_row and x.shape[0] == 1:
            return self._multiply(x.expand(2, -1), packed, layer.bias, "none", [], "")[:1]
        return self._multiply(x, packed, layer.bias, "none", [], "")


def default_linear_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Return the best linear method that torch itself brings for ``dtype`` and ``device``."""
    if OneDNNLinearMethod.why_not(dtype, device) is None:
        return OneDNNLinearMethod()
    return TorchLinearMethod()
