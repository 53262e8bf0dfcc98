"""Rotary position embedding (Su et al. 2021) and the ways to stretch it over longer contexts.

The cosines and sines of all positions are computed once, in float32 and in the order of operations of transformers,
then rounded to the model's dtype. A step picks the rows of its positions once (:meth:`RotaryEmbedding.forward`) for all
its layers.

A head is rotated by halves, number ``i`` of the first half with number ``i`` of the second one, and where that is done
its key is stored (:mod:`asyncllm.kernels.fused`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from asyncllm.errors import CheckpointError, UnsupportedModelError, shown
from asyncllm.kernels.fused import Rotation

__all__ = ["RotaryEmbedding", "rope_parameters"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions below ``num_positions``, by the ``parameters`` of :func:`rope_parameters`.

    :raises UnsupportedModelError: the way of scaling is not one that we compute; names it.
    :raises CheckpointError: a parameter of it is missing.
    """

    table: torch.Tensor  # [P, 2, D / 2]: cosine, sine

    def __init__(
        self,
        head_dim: int,
        num_positions: int,
        parameters: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        inverse_frequencies, scale = rope_frequencies(head_dim, parameters)
        angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies  # [P, D / 2]
        table = torch.stack((angles.cos() * scale, angles.sin() * scale), 1)
        self.register_buffer("table", table.to(device=device, dtype=dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of tokens at ``positions`` [T] (int64)."""
        rows = self.table.index_select(0, positions)  # [T, 2, D / 2]
        cos, sin = rows[:, None, :1], rows[:, None, 1:]
        return Rotation(cos, torch.cat((-sin, sin), 2))


def rope_parameters(config: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """Return the rotary parameters in one form, with ``rope_type`` and ``rope_theta``, from either form of a config.

    New files have ``rope_parameters`` (maybe one set per ``layer_type``), older ones ``rope_theta`` and
    ``rope_scaling``.

    :raises CheckpointError: they are no object.
    """
    found: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"rotary parameters are {shown(found)!r}; they must be an object", file="config.json")
    parameters = dict(cast("Mapping[str, Any]", found))
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = dict(cast("Mapping[str, Any]", parameters[layer_type]))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta") or 10000.0
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    parameters["max_position_embeddings"] = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return parameters


def rope_frequencies(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair of numbers [head_dim / 2], and the factor on cosines and sines.

    :raises UnsupportedModelError: the way of scaling is not one that we compute; names it.
    :raises CheckpointError: a parameter of it is missing or cannot be.
    """
    kind, base = str(parameters["rope_type"]), parameters["rope_theta"]
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < math.inf:
        raise CheckpointError(f"rope_theta is {shown(base)!r}; it must be a positive number", file="config.json")
    compute = TYPE_TO_FREQUENCIES.get(kind)
    if compute is None:
        raise UnsupportedModelError(
            f"rotary scaling {kind!r} is not supported; known are {', '.join(sorted(TYPE_TO_FREQUENCIES))}",
            feature=f"rope_type {kind}",
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "rotary positions on a part of each head are not supported", feature="partial_rotary_factor"
        )
    try:
        return compute(head_dim, parameters)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"rotary scaling {kind!r} lacks or misstates {error}", file="config.json") from error


def _plain(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    return 1.0 / _wavelengths(head_dim, parameters), 1.0


def _wavelengths(head_dim: int, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Return the positions per radian of each pair of numbers."""
    return parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)


def _linear(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    frequencies, scale = _plain(head_dim, parameters)
    factor = parameters["factor"]
    if not factor > 0:
        raise ValueError(f"'factor' = {factor}")
    return frequencies / factor, scale


def _divided(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return frequencies divided one by one: how a GGUF file writes the result of Llama 3's scaling."""
    frequencies, scale = _plain(head_dim, parameters)
    factors = torch.tensor(parameters["factors"], dtype=torch.float32)
    if factors.shape != frequencies.shape:
        raise CheckpointError(f"there are {len(factors)} rotary factors for {len(frequencies)} frequencies")
    return frequencies / factors, scale


def _llama3(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return low frequencies divided, high ones kept, and those between interpolated (Llama 3.1)."""
    frequencies, scale = _plain(head_dim, parameters)
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    context = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), scale


def _yarn(head_dim: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return frequencies interpolated below and kept above a ramp of rotations per context (Peng et al. 2023)."""
    context = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or parameters["max_position_embeddings"] / context

    def dimension(rotations: float) -> float:
        turns = math.log(context / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(parameters["rope_theta"]))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    wavelengths = _wavelengths(head_dim, parameters)
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


TYPE_TO_FREQUENCIES: dict[str, Callable[[int, Mapping[str, Any]], tuple[torch.Tensor, float]]] = {
    "default": _plain,
    "dynamic": _plain,  # it changes only what lies beyond max_position_embeddings, where no sequence of ours goes
    "factors": _divided,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
