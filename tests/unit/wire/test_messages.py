"""The wire: every message survives it, columns stay small, and the compatibility rule holds."""

from __future__ import annotations

import typing

import msgspec
import pytest

from asyncllm.errors import ErrorInfo
from asyncllm.wire import messages, step
from asyncllm.wire.codec import input_decoder, make_encoder, output_decoder
from asyncllm.wire.messages import (
    AbortRequests,
    Configure,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDied,
    EngineInfo,
    EngineReady,
    EngineSampling,
    FinishedRequest,
    FinishRequests,
    LogprobRows,
    ParkRequests,
    PinPrefix,
    RareSampling,
    RequestTimes,
    SchedulerStats,
    Shutdown,
    StartupFailed,
    StartupProgress,
    UnpinPrefixes,
    UtilityCall,
    UtilityResult,
)

INPUTS = [
    EngineCoreRequest(
        2**40,
        [1, 2, 3],
        EngineSampling(5, seed=2**64 - 1, logit_bias={3: -1.5}, rare=RareSampling([[4], [5, 6]], [7], (1, 20, 3))),
        -1,
        "salt",
        11,
    ),
    AbortRequests([1, 2]),
    FinishRequests([3]),
    ParkRequests([4], True),
    PinPrefix(7, [1, 2], "salt"),
    UnpinPrefixes([7]),
    UtilityCall(9, "collective_rpc", ["echo", [1, {"a": None}]]),
    Shutdown(),
    Configure({"model": {"model": "x"}}),
]
OUTPUTS = [
    StartupProgress("load model", 0.5),
    EngineReady(EngineInfo(10, 20, [2], 16, 4, 1, 2, 3, "cpu", "float32", "cpu", 77, {"load": 0.5})),
    StartupFailed(ErrorInfo("ModelNotFoundError", "no", {"model": "x"}), "load"),
    EngineCoreOutputs(
        [1, 2],
        [5, 6],
        [FinishedRequest(2, 0, 7, 16, 1, ErrorInfo("A", "b"))],
        {1: LogprobRows(2, [5, 9], [-0.5, -1.5], [1, 2])},
        {},
        SchedulerStats(1, 2, 3),
        {1: 16},
        {1: RequestTimes(0.5, 0.25), 2: RequestTimes(0.125)},
        {2: 1},
    ),
    UtilityResult(9, {"x": [1.5]}, None),
    EngineDied(ErrorInfo("RuntimeError", "boom")),
]


@pytest.mark.parametrize("message", INPUTS, ids=lambda m: type(m).__name__)
def test_every_input_survives_the_wire(message: messages.EngineInput) -> None:
    assert input_decoder()(make_encoder()(message)) == message


@pytest.mark.parametrize("message", OUTPUTS, ids=lambda m: type(m).__name__)
def test_every_output_survives_the_wire(message: messages.EngineOutput) -> None:
    assert output_decoder()(make_encoder()(message)) == message


def test_every_message_of_both_directions_is_tried() -> None:
    assert {type(m) for m in INPUTS} == set(typing.get_args(messages.EngineInput))
    assert {type(m) for m in OUTPUTS} == set(typing.get_args(messages.EngineOutput))


def test_tags_are_fixed() -> None:
    """Tags are part of the wire: a change here breaks a front end and an engine of different versions."""
    tags = {cls.__name__: cls.__struct_config__.tag for cls in typing.get_args(messages.EngineInput)}
    assert list(tags.values()) == list(range(9))
    tags = {cls.__name__: cls.__struct_config__.tag for cls in typing.get_args(messages.EngineOutput)}
    assert list(tags.values()) == list(range(1, 7))


@pytest.mark.parametrize(
    "cls",
    [
        c
        for m in (messages, step)
        for n in m.__all__
        if isinstance(c := getattr(m, n), type) and issubclass(c, msgspec.Struct)
    ],
)
def test_structs_are_positional(cls: type[msgspec.Struct]) -> None:
    assert cls.__struct_config__.array_like


def test_an_older_peer_may_leave_out_appended_fields() -> None:
    assert input_decoder()(msgspec.msgpack.encode([0, 7, [1], [5]])) == EngineCoreRequest(7, [1], EngineSampling(5))


def test_b16_a_number_over_64_bits_is_refused_by_the_encoder() -> None:
    with pytest.raises(OverflowError):
        make_encoder()(AbortRequests([2**64]))


def test_a_frame_that_is_no_message_is_a_decode_error() -> None:
    for frame in (b"", b"\xc1", msgspec.msgpack.encode([99]), msgspec.msgpack.encode([4, ["x"]])):
        with pytest.raises(msgspec.DecodeError):
            output_decoder()(frame)


def test_a_step_of_256_plain_tokens_costs_few_bytes_per_token() -> None:
    outputs = EngineCoreOutputs(list(range(1000, 1256)), [40_000] * 256, stats=SchedulerStats(256, 0, 1000))
    assert len(make_encoder()(outputs)) / 256 < 7


def test_a_plain_request_costs_few_bytes_beside_its_prompt() -> None:
    """Options that it does not use are a byte at most."""
    assert len(make_encoder()(EngineCoreRequest(1000, [], EngineSampling(5)))) <= 78
