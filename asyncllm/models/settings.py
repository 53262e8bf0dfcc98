"""A configuration as a typed struct: what a family reads from ``config.json``, checked once at construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from asyncllm.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint

__all__ = ["FULL", "SLIDING", "Count", "check_layer_types", "read_settings"]

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A size or a number of things."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in ``layer_types``: such that see all tokens, and such that see a window of them."""

T = TypeVar("T", bound=msgspec.Struct)


def read_settings(checkpoint: Checkpoint, kind: type[T]) -> T:
    """Return the fields of ``kind`` from the checkpoint's configuration; other keys are left alone.

    :raises CheckpointError: a field without a default is missing, or a value is of the wrong type or out of range.
    """
    try:
        return msgspec.convert(checkpoint.text_config, kind)
    except msgspec.ValidationError as error:
        raise checkpoint.damaged(f"cannot be used: {error}") from error


def check_layer_types(kinds: list[str], num_layers: int) -> list[str]:
    """Return ``kinds`` if they are those of ``num_layers`` layers, each ``FULL`` or ``SLIDING``.

    :raises UnsupportedModelError: there is one that is neither; names it.
    :raises CheckpointError: there are more or fewer of them than layers.
    """
    if len(kinds) != num_layers:
        raise CheckpointError(f"there are {len(kinds)} layer_types for {num_layers} layers")
    if unknown := set(kinds) - {FULL, SLIDING}:
        name = min(unknown)
        raise UnsupportedModelError(f"the layer type {name!r} is not supported", feature=f"layer type {name}")
    return kinds
