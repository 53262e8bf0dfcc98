"""Encode and decode the messages of a border with msgspec's msgpack.

A frame that does not decode raises :class:`msgspec.DecodeError` (a ``ValidationError`` where only the shape is wrong).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncllm.wire.messages import EngineInput, EngineOutput

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["encode", "input_decoder", "make_encoder", "output_decoder"]


def encode(message: EngineInput | EngineOutput) -> bytes:
    """Return ``message`` as one frame. Any thread may call it.

    :raises OverflowError: an integer does not fit 64 bits.
    :raises TypeError: a value is not plain data.
    """
    return msgspec.msgpack.encode(message)


def make_encoder() -> Callable[[EngineInput | EngineOutput], bytes]:
    """Return an encoder for one thread; as :func:`encode`, without the call's set-up.

    :raises OverflowError: an integer does not fit 64 bits.
    """
    return msgspec.msgpack.Encoder().encode


def input_decoder() -> Callable[[bytes], EngineInput]:
    """Return a decoder of messages to the engine, for one thread."""
    return msgspec.msgpack.Decoder(EngineInput).decode


def output_decoder() -> Callable[[bytes], EngineOutput]:
    """Return a decoder of messages from the engine, for one thread."""
    return msgspec.msgpack.Decoder(EngineOutput).decode
