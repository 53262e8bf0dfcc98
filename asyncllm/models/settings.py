"""A configuration as a typed struct: what a family reads from ``config.json``, checked once at construction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint

__all__ = ["Count", "read_settings"]

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A size or a number of things."""

T = TypeVar("T", bound=msgspec.Struct)


def read_settings(checkpoint: Checkpoint, kind: type[T]) -> T:
    """Return the fields of ``kind`` from the checkpoint's configuration; other keys are left alone.

    :raises CheckpointError: a field without a default is missing, or a value is of the wrong type or out of range.
    """
    try:
        return msgspec.convert(checkpoint.text_config, kind)
    except msgspec.ValidationError as error:
        raise checkpoint.damaged(f"cannot be used: {error}") from error
