"""Engine options: unknown names, ranges, and the way to the engine process as plain data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError


def test_flat_options_reach_their_section() -> None:
    config = EngineConfig.from_options("m", block_size=32, max_num_seqs=4, num_threads=1, in_process=True)
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 4)
    assert (config.device.num_threads, config.frontend.in_process) == (1, True)


def test_option_names_are_unique_over_sections() -> None:
    names = [f.name for s in dataclasses.fields(EngineConfig) for f in dataclasses.fields(_section(s.name))]
    assert len(names) == len(set(names))


def _section(name: str) -> type:
    return type(getattr(EngineConfig.from_options("m"), name))


def test_only_an_engine_process_can_give_way() -> None:
    assert EngineConfig.from_options("m", share_cores=True).device.share_cores
    with pytest.raises(ConfigError, match="in_process=True") as caught:
        EngineConfig.from_options("m", share_cores=True, in_process=True)
    assert caught.value.parameter == "share_cores"


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'") as caught:
        EngineConfig.from_options("m", max_num_seq=4)
    assert caught.value.parameter == "max_num_seq"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("block_size", 16.0),
        ("num_blocks", 1),
        ("memory_fraction", 1.5),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("enforce_eager", 1),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("policy", "lifo"),
        ("async_scheduling", "always"),
        ("async_scheduling", 1),
        ("dtype", "int3"),
        ("quantization", "int3"),
        ("quantization", 8),
        ("max_model_len", 0),
        ("executor", "nosuch"),
        ("worker_cls", "nosuch"),
        ("num_threads", 0),
        ("startup_timeout_s", 0),
        ("shutdown_timeout_s", -1),
        ("max_buffered_tokens", 0),
        ("max_buffered_tokens", 2**63),
        ("enable_prefix_caching", "no"),
        ("tokenizer", 5),
        ("chat_template", 5),
        ("device", None),
        ("executor", 5),
        ("startup_timeout_s", "soon"),
        ("startup_timeout_s", float("nan")),
        ("executor_options", None),
    ],
)
def test_a_value_out_of_range_names_parameter_value_and_limit(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options("m", **{option: value})
    assert caught.value.parameter == option
    assert caught.value.value == value or value != value
    assert caught.value.limit
    assert option in str(caught.value)


def test_a_tokenizer_may_be_given_as_a_path() -> None:
    assert EngineConfig.from_options("m", tokenizer=Path("a/b")).model.tokenizer == "a/b"


def test_the_configuration_is_frozen() -> None:
    config = EngineConfig.from_options("m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 8  # type: ignore[misc]


def test_the_configuration_survives_the_wire() -> None:
    config = EngineConfig.from_options("m", executor="a.b.C", executor_options={"tokens": [1, 2]}, max_model_len=99)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(config))
    assert msgspec.convert(plain, EngineConfig) == config
