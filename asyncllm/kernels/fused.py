"""What a step does besides matrix products and attention, as one operation each, so that a GPU does each in one launch.

* :class:`FusedKernels`: the operations in torch, for any device: what a CPU computes, and what the tests hold the
  Triton kernels to (:mod:`asyncllm.kernels.triton.fused`, of the same signatures).
* :func:`fused_kernels`: chooses between the two by the device; a layer asks once, when it is made.

Letters as in :mod:`asyncllm.attention.base`. Invariant: a row of any result depends on that row's inputs alone, bit for
bit, and is rounded to the model's dtype where transformers rounds it.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from asyncllm import env
from asyncllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.kernels.base import DrawnTokens

__all__ = [
    "NAME_TO_ACTIVATION",
    "FusedKernels",
    "HeadNorms",
    "Rotation",
    "apply_gated",
    "apply_rotary",
    "fused_kernels",
    "rms_norm",
    "rotate_heads",
]

SERIAL_ELEMENTS = 32_768
"""torch runs an elementwise operation on fewer numbers than this in one piece (``at::internal::GRAIN_SIZE``)."""


class Rotation(NamedTuple):
    """The rotation of each token of a step."""

    cos: torch.Tensor  # [T, 1, 1, D / 2]
    sin: torch.Tensor  # [T, 1, 2, D / 2]: minus sine for the first half, sine for the second


class HeadNorms(NamedTuple):
    """RMSNorms of each query and of each key head before it is rotated; weights as :func:`rms_norm` takes them."""

    query_weight: torch.Tensor  # [D]
    key_weight: torch.Tensor  # [D]
    eps: float


class FusedKernels:
    """The operations in torch."""

    name = "torch"
    draws = False
    """Whether there is :meth:`draw_tokens`; else drawing is left to the sampler in torch."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x`` [T, size] normalised as :func:`rms_norm` does, as a new tensor."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``update`` to ``hidden`` (both [T, size]) in place, and return the sum normalised, as a new tensor."""
        return rms_norm(hidden.add_(update), weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` [T, size] of ``gate_up`` [T, 2 * size], by a :data:`NAME_TO_ACTIVATION`."""
        return apply_gated(NAME_TO_ACTIVATION[activation], gate_up, gate_up.shape[1] // 2)

    def rotate_and_write(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        cache: torch.Tensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Return the query heads [T, H, D] normalised and rotated, as a new tensor; store keys and values.

        ``heads`` [T, H + 2 * KV, D] are query, key and value heads; they stay as they are. ``cache`` [2, N, S, KV, D]
        takes the keys, normalised and rotated, and the values, each token's at its slot of ``slots`` [T] (int64; block
        * S + offset). A negative slot stores nothing; slot 0, of the null block, belongs to no token.
        """
        num_kv_heads, block_size = cache.shape[3], cache.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = rotate_heads(heads, num_kv_heads, rotation, norms)
        places = slots.clamp_min(0)
        blocks, offsets = places // block_size, places % block_size
        stored = (slots >= 0)[:, None, None]
        for part, new in zip(cache, (rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]), strict=True):
            kept = torch.where(stored, new.to(cache.dtype), part[blocks, offsets])
            part.index_put_((blocks, offsets), kept)
        return rotated[:, :num_heads]

    def draw_tokens(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        number: torch.Tensor,
    ) -> DrawnTokens:
        """Return a token of each row of ``logits`` [R, V] float32.

        The parameters are columns [R] on the device, as in :data:`asyncllm.kernels.base.SAMPLING_DTYPE`; ``number``
        [R] (float64) is the row's uniform number. The distribution is that of :mod:`asyncllm.sampling.sampler`.

        :raises TypeError: these kernels do not draw.
        """
        raise TypeError(f"the {self.name} kernels do not draw")


def fused_kernels(device: torch.device) -> FusedKernels:
    """Return the operations for tensors on ``device``: in Triton on a GPU where triton is installed, else in torch.

    :raises ConfigError: ``ASYNCLLM_FUSED_KERNELS`` names neither, or ``triton`` where that cannot run.
    """
    wanted = env.fused_kernels()
    if wanted not in (None, "torch", "triton"):
        raise ConfigError(f"ASYNCLLM_FUSED_KERNELS is {wanted!r}; it must be torch or triton")
    found = importlib.util.find_spec("triton") is not None
    if wanted == "torch" or (wanted is None and not (found and device.type == "cuda")):
        return FusedKernels()
    if not found:
        raise ConfigError("ASYNCLLM_FUSED_KERNELS is 'triton', which is not installed")
    from asyncllm.kernels.triton.fused import INTERPRETED, TritonFusedKernels

    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(f"ASYNCLLM_FUSED_KERNELS is 'triton', which runs on {device.type} in its interpreter only")
    return TritonFusedKernels()


# ---- norms -----------------------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x`` [..., size] normalised over its last dimension (Zhang and Sennrich 2019), as a new tensor.

    All of it in float32 where ``weight`` is (Gemma); else rounded to the dtype of ``x`` before the weight is applied
    (Llama).
    """
    if x.dtype == torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)  # the same operations in one call
    if weight.dtype == torch.float32:
        return torch.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


# ---- heads -----------------------------------------------------------------------------------------------------------


def rotate_heads(
    heads: torch.Tensor, num_kv_heads: int, rotation: Rotation, norms: HeadNorms | None = None
) -> torch.Tensor:
    """Return the query and key heads [T, H + KV, D] of ``heads`` [T, H + 2 * KV, D] normalised and rotated."""
    rotated = heads[:, : heads.shape[1] - num_kv_heads]
    if norms is not None:
        num_heads = rotated.shape[1] - num_kv_heads
        query = rms_norm(rotated[:, :num_heads], norms.query_weight, norms.eps)
        rotated = torch.cat((query, rms_norm(rotated[:, num_heads:], norms.key_weight, norms.eps)), 1)
    return apply_rotary(rotated, rotation)


def apply_rotary(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return the heads ``x`` [T, H, D] (may be a strided view) rotated, as a new contiguous tensor."""
    num_tokens, num_heads, head_dim = x.shape
    halves = x.view(num_tokens, num_heads, 2, head_dim // 2)
    rotated = halves * rotation.cos
    rotated.add_(halves.flip(2).mul_(rotation.sin))
    return rotated.view(num_tokens, num_heads, head_dim)


# ---- activations -----------------------------------------------------------------------------------------------------


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


NAME_TO_ACTIVATION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""Elementwise functions by what a configuration calls them."""


def apply_gated(activation: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor, size: int) -> torch.Tensor:
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
