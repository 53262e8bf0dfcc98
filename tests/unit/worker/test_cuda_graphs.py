"""Which sizes are recorded, and that a replay computes with what is in the static inputs by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
from tests.support.emulated_device import EmulatedRuntime, HostSync


def test_the_largest_size_holds_all_rows_and_small_ones_are_close() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    for most in (1, 3, 64, 100, 256, 300, 512):
        assert graph_sizes(most)[-1] == most
    assert graph_sizes(4096)[-1] == 512


def recorded(sizes: list[int]) -> tuple[DecodeGraphs, EmulatedRuntime, torch.Tensor]:
    runtime, inputs = EmulatedRuntime(), torch.arange(8.0)

    def work_of(size: int) -> Callable[[], torch.Tensor]:
        return lambda: inputs[:size].unsqueeze(1) * torch.tensor([1.0, 2.0])

    graphs = DecodeGraphs(runtime, sizes)
    graphs.capture(work_of)
    return graphs, runtime, inputs


def test_a_step_takes_the_next_larger_size_and_none_beyond_the_largest() -> None:
    graphs, _, _ = recorded([1, 2, 8])
    assert [graphs.size_for(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]


def test_a_replay_reads_the_static_inputs_of_now() -> None:
    graphs, runtime, inputs = recorded([2, 4])
    inputs.copy_(torch.arange(8.0) + 10)
    assert graphs.replay(2).tolist() == [[10, 20], [11, 22]]
    assert graphs.replay(4).tolist() == [[10, 20], [11, 22], [12, 24], [13, 26]]
    assert runtime.num_replays == 2


def test_without_graphs_there_is_no_size() -> None:
    graphs, _, _ = recorded([1, 2])
    graphs.drop()
    assert graphs.size_for(1) is None
    assert DecodeGraphs(EmulatedRuntime(), []).size_for(1) is None


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
    ],
    ids=["item", "bool", "nonzero", "mask"],
)
def test_recording_refuses_what_would_wait_for_the_device(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3)
    with pytest.raises(HostSync):
        EmulatedRuntime().capture(lambda: work(x))
