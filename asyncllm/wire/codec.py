"""Encode and decode the messages of a border with msgspec's msgpack; one encoder and decoder per thread.

A frame that does not decode raises :class:`msgspec.DecodeError` (a ``ValidationError`` where only the shape is wrong).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from asyncllm.wire.messages import EngineInput, EngineOutput

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["input_decoder", "make_encoder", "output_decoder"]


def make_encoder() -> Callable[[EngineInput | EngineOutput], bytes]:
    """Return an encoder; not to be shared between threads.

    :raises OverflowError: an integer does not fit 64 bits.
    """
    return msgspec.msgpack.Encoder().encode


def input_decoder() -> Callable[[bytes], EngineInput]:
    """Return the decoder of messages to the engine."""
    return msgspec.msgpack.Decoder(EngineInput).decode


def output_decoder() -> Callable[[bytes], EngineOutput]:
    """Return the decoder of messages from the engine."""
    return msgspec.msgpack.Decoder(EngineOutput).decode
