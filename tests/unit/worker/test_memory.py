from __future__ import annotations

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import InsufficientMemoryError
from asyncllm.worker.memory import KVCachePlan, MemoryProfile, plan_kv_cache

MIB = 1 << 20


def plan(free_bytes: int = 1000 * MIB, cap_bytes: int | None = 4000 * MIB, **options: object) -> KVCachePlan:
    """Blocks of 16 tokens and 1 MiB, a model of 1024 positions: a full request takes 64 blocks."""
    config = EngineConfig.from_options("model", **options)
    return plan_kv_cache(config, model_max_len=1024, bytes_per_block=MIB, free_bytes=free_bytes, cap_bytes=cap_bytes)


def test_a_share_of_the_free_memory_less_the_null_block() -> None:
    assert plan(memory_fraction=0.5) == KVCachePlan(num_blocks=499, max_model_len=1024)


def test_no_more_than_the_cap() -> None:
    assert plan(cap_bytes=100 * MIB).num_blocks == 99
    assert plan(free_bytes=10_000 * MIB, cap_bytes=None, memory_fraction=0.5).num_blocks == 4999


def test_no_more_than_all_requests_could_fill() -> None:
    assert plan(max_num_seqs=2).num_blocks == 128
    assert plan(max_num_seqs=2, max_model_len=100).num_blocks == 14


def test_options_are_taken_as_they_are() -> None:
    assert plan(num_blocks=700, max_num_seqs=1) == KVCachePlan(num_blocks=700, max_model_len=1024)
    assert plan(kv_cache_bytes=200 * MIB, max_num_seqs=1).num_blocks == 199


def test_r55_a_length_nobody_asked_for_is_lowered_to_what_fits() -> None:
    assert plan(free_bytes=100 * MIB) == KVCachePlan(num_blocks=39, max_model_len=39 * 16)
    assert plan(num_blocks=10) == KVCachePlan(num_blocks=10, max_model_len=160)
    assert plan(kv_cache_bytes=5 * MIB) == KVCachePlan(num_blocks=4, max_model_len=64)


def test_case88_a_length_that_was_asked_for_must_fit() -> None:
    with pytest.raises(InsufficientMemoryError, match="largest max_model_len that would fit is 624") as caught:
        plan(free_bytes=100 * MIB, max_model_len=1000)
    assert caught.value.max_model_len_fit == 624
    assert caught.value.needed_bytes == 64 * MIB  # 63 blocks and the null block
    assert caught.value.available_bytes == 40 * MIB
    assert plan(free_bytes=100 * MIB, max_model_len=624).max_model_len == 624
    with pytest.raises(InsufficientMemoryError):
        plan(kv_cache_bytes=10 * MIB, max_model_len=1000)


def test_r62_a_pool_that_was_asked_for_may_be_smaller_than_the_longest_request() -> None:
    assert plan(num_blocks=49, max_model_len=1024) == KVCachePlan(num_blocks=49, max_model_len=1024)


def test_options_beyond_the_free_memory_are_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="num_blocks=2000"):
        plan(num_blocks=2000)
    with pytest.raises(InsufficientMemoryError, match="kv_cache_bytes=") as caught:
        plan(kv_cache_bytes=1001 * MIB)
    assert caught.value.max_model_len_fit == 999 * 16


def test_kv_cache_bytes_that_hold_no_block_say_what_is_needed() -> None:
    words = r"kv_cache_bytes=1000 holds 0 KV blocks.*needs 64; .*Raise kv_cache_bytes to at least 68157440\.$"
    with pytest.raises(InsufficientMemoryError, match=words) as caught:
        plan(kv_cache_bytes=1000)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (65 * MIB, 1000)
    assert plan(kv_cache_bytes=65 * MIB).max_model_len == 1024
    with pytest.raises(InsufficientMemoryError, match=r"holds 9 KV blocks.*is 144\. .*or lower max_model_len\.$"):
        plan(kv_cache_bytes=10 * MIB, max_model_len=1000)


def test_options_beyond_the_memory_say_what_they_can_be() -> None:
    with pytest.raises(
        InsufficientMemoryError, match=rf"but there is room for .*Lower kv_cache_bytes to at most {MIB * 1000}\.$"
    ):
        plan(kv_cache_bytes=10**12)
    assert plan(kv_cache_bytes=1000 * MIB).num_blocks == 999
    with pytest.raises(InsufficientMemoryError, match=r"Lower num_blocks to at most 999\.$"):
        plan(num_blocks=1000)
    assert plan(num_blocks=999).num_blocks == 999


def test_no_room_for_a_single_block() -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(free_bytes=2 * MIB)
    assert caught.value.max_model_len_fit == 0


# ----------------------------------------------------------------------------------------- a device with its own memory
def profile(**changes: int) -> MemoryProfile:
    """1000 MiB of which 300 hold weights; a step takes 100."""
    values = {"total_bytes": 1000, "free_bytes": 700, "used_bytes": 300, "step_bytes": 100, **changes}
    return MemoryProfile(**{name: value * MIB for name, value in values.items()})


def plan_on_device(found: MemoryProfile, **options: object) -> KVCachePlan:
    config = EngineConfig.from_options("model", **options)
    return plan_kv_cache(config, model_max_len=1024, bytes_per_block=MIB, profile=found)


def test_blocks_take_what_weights_step_and_graphs_leave_of_the_share() -> None:
    assert plan_on_device(profile()).num_blocks == 900 - 300 - 100 - 1
    assert plan_on_device(profile(graph_bytes=40)).num_blocks == 900 - 300 - 100 - 40 - 1
    assert plan_on_device(profile(), gpu_memory_utilization=0.5).num_blocks == 500 - 300 - 100 - 1


def test_what_others_use_of_the_device_is_not_there() -> None:
    assert plan_on_device(profile(free_bytes=250)).num_blocks == 250 - 100 - 1


def test_a_device_too_has_no_more_blocks_than_all_requests_could_fill() -> None:
    assert plan_on_device(profile(), max_num_seqs=2).num_blocks == 128


def test_memory_fraction_means_nothing_on_a_device_and_the_utilization_nothing_on_a_host() -> None:
    assert plan_on_device(profile(), memory_fraction=0.01) == plan_on_device(profile())
    assert plan(gpu_memory_utilization=0.01) == plan()


def test_a_length_that_does_not_fit_the_device_says_where_the_memory_went() -> None:
    words = (
        r"64 KV blocks \(65\.0 MiB\), but there is room for 40\.0 MiB .*900\.0 MiB: weights 760\.0 MiB, "
        r"the largest step 100\.0 MiB\); the largest max_model_len that would fit is 624\."
        r".*max_num_seqs.*gpu_memory_utilization"
    )
    small = profile(used_bytes=760, free_bytes=240)
    with pytest.raises(InsufficientMemoryError, match=words) as caught:
        plan_on_device(small, max_model_len=1024)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (65 * MIB, 40 * MIB)
    assert caught.value.max_model_len_fit == 624
    assert plan_on_device(small, max_model_len=624).num_blocks == 39


def test_weights_and_step_alone_can_be_too_much() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"room for 0\.0 MiB") as caught:
        plan_on_device(profile(used_bytes=850))
    assert caught.value.max_model_len_fit == 0


def test_options_beyond_the_room_on_the_device_are_refused() -> None:
    assert plan_on_device(profile(), num_blocks=499).num_blocks == 499
    with pytest.raises(InsufficientMemoryError, match=r"num_blocks=500 .*CUDA graphs 10\.0 MiB"):
        plan_on_device(profile(graph_bytes=10), num_blocks=500)
    with pytest.raises(InsufficientMemoryError, match="kv_cache_bytes="):
        plan_on_device(profile(), kv_cache_bytes=501 * MIB)
