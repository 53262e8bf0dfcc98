"""Static fields, staging blocks in turn, one copy per step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.attention.base import StepField
from asyncllm.worker.device_runtime import CpuRuntime, DeviceRuntime, Staging
from asyncllm.worker.step_buffers import StepBuffers
from tests.support.emulated_device import EmulatedRuntime

FIELDS = [
    StepField("ids", (5,), np.int64),
    StepField("flags", (3,), np.int32),
    StepField("work", (7, 4), np.int32),
    StepField("numbers", (2,), np.float64),
]


@pytest.mark.parametrize("runtime", [CpuRuntime(), EmulatedRuntime()], ids=["shared", "separate"])
def test_what_is_staged_is_on_the_device_after_the_copy(runtime: DeviceRuntime) -> None:
    buffers = StepBuffers(runtime, FIELDS)
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.device.items()}
    for turn in range(5):
        staged = buffers.begin()
        for nth, field in enumerate(FIELDS):
            staged[field.name][...] = np.arange(np.prod(field.shape)).reshape(field.shape) + 100 * nth + turn
        buffers.commit()
        for nth, field in enumerate(FIELDS):
            on_device = buffers.device[field.name]
            assert on_device.shape == field.shape
            assert on_device.flatten().tolist() == [i + 100 * nth + turn for i in range(on_device.numel())]
    assert {name: tensor.data_ptr() for name, tensor in buffers.device.items()} == addresses


def test_every_field_is_aligned_and_keeps_its_dtype() -> None:
    buffers = StepBuffers(CpuRuntime(), FIELDS)
    begin = min(tensor.data_ptr() for tensor in buffers.device.values())
    assert all((tensor.data_ptr() - begin) % 64 == 0 for tensor in buffers.device.values())
    assert [tensor.dtype for tensor in buffers.device.values()] == [
        torch.int64,
        torch.int32,
        torch.int32,
        torch.float64,
    ]


def test_a_device_with_its_own_memory_gets_one_copy_and_two_blocks_in_turn() -> None:
    runtime = EmulatedRuntime()
    buffers = StepBuffers(runtime, FIELDS)
    first, second, third = buffers.begin(), buffers.begin(), buffers.begin()
    assert first["ids"] is third["ids"]
    assert not np.shares_memory(first["ids"], second["ids"])
    buffers.commit()
    assert runtime.num_copies == 1


def test_a_staging_block_waits_for_its_own_last_copy_only() -> None:
    waited: list[int] = []

    class Counting(EmulatedRuntime):
        def copy(self, staging: Staging, block: torch.Tensor) -> object:  # type: ignore[override]
            super().copy(staging, block)
            nth = self.num_copies

            class Numbered:
                def synchronize(self) -> None:
                    waited.append(nth)

            return Numbered()

    buffers = StepBuffers(Counting(), FIELDS)
    for _ in range(4):
        buffers.begin()
        buffers.commit()
    assert waited == [1, 2]
