"""A worker that gives its memory back and takes it again, on the host's memory and on a device with its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from asyncllm.attention.base import GraphSupport
from asyncllm.attention.cpu import CpuAttention
from asyncllm.errors import CheckpointError, InsufficientMemoryError, ModelNotFoundError, UsageError
from asyncllm.kernels import library
from asyncllm.platforms.cpu import CpuPlatform
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker import offload, profile_run
from asyncllm.worker.cuda_graphs import DecodeGraphs
from asyncllm.worker.device_runtime import CpuRuntime
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.worker import Worker
from tests.support import models
from tests.support.sampling import sampling
from tests.unit.worker.test_worker import Started

PROMPT = [5, 6, 7, 8, 9, 10]

needs_native = pytest.mark.skipif(library.available().isa is None, reason=f"native: {library.available().reason}")
PATHS = [
    pytest.param({"attention_backend": "native"}, marks=needs_native, id="native"),
    pytest.param({"attention_backend": "native", "quantization": "int8"}, marks=needs_native, id="int8"),
    pytest.param({"attention_backend": "cpu"}, id="torch"),
    pytest.param({"attention_backend": "cpu", "dtype": "bfloat16"}, id="torch-bfloat16"),
]
INTERPRETED = pytest.param({"attention_backend": "triton", "max_num_seqs": 3}, marks=pytest.mark.triton, id="triton")


def run(started: Started, count: int = 6) -> list[int]:
    """Return the first tokens after the prompt; the slot is free again afterwards."""
    request = NewRequest(0, 1, PROMPT, len(PROMPT), 0, [3, 4], sampling())
    step = SchedulerOutput(1, [0], [len(PROMPT)], len(PROMPT), [request])
    tokens = started.executor.execute_model(step).result().token_ids
    for _ in range(count - 1):
        tokens += started.executor.execute_model(SchedulerOutput(2, [0], [1], 1)).result().token_ids
    started.batch.apply(SchedulerOutput(3, [], [], 0, freed_slots=[0]))
    return tokens


def anonymous_bytes() -> int:
    """Return the memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


@pytest.mark.parametrize("options", [*PATHS, INTERPRETED])
@pytest.mark.parametrize("levels", [[1], [2], [1, 1], [1, 2], [2, 1]])
def test_it_wakes_up_with_the_same_tokens_and_an_empty_batch(
    tiny_llama: Path, options: dict[str, Any], levels: list[int]
) -> None:
    with Started(tiny_llama, **options) as started:
        before = run(started)
        started.executor.execute_model(
            SchedulerOutput(4, [2], [1], 1, [NewRequest(2, 7, [1, 2], 2, 0, [1], sampling())])
        ).result()
        for level in levels:
            started.worker.sleep(level)
        with pytest.raises(UsageError, match="asleep"):
            run(started)
        started.worker.wake_up()
        assert not started.batch.slot_to_request_id
        assert run(started) == before
        started.worker.wake_up()
        assert run(started) == before


@pytest.mark.parametrize("options", PATHS)
def test_the_memory_goes_back_to_the_system(tmp_path: Path, options: dict[str, Any]) -> None:
    big = models.write_tiny_llama(tmp_path / "model", intermediate_size=8192, hidden_size=256)
    weights = 3 * 2 * 8192 * 256  # numbers in the MLPs
    weight_bytes = weights * (1 if "quantization" in options else 2 if "dtype" in options else 4)
    with Started(big, num_blocks=2048, **options) as started:
        caches = started.worker._kv_caches
        for cache in caches:
            cache.zero_().add_(1)  # the system gives pages when they are first written
        cache_bytes = sum(cache.numel() * cache.itemsize for cache in caches)
        del caches, cache
        awake = anonymous_bytes()
        started.worker.sleep(1)
        asleep = anonymous_bytes()
        assert awake - asleep > 0.95 * cache_bytes
        started.worker.sleep(2)
        assert asleep - anonymous_bytes() > 0.9 * weight_bytes
        started.worker.wake_up()
        assert run(started)


def test_level_2_lets_go_of_the_model_and_level_1_of_a_cpu_does_not(tiny_llama: Path) -> None:
    with Started(tiny_llama, attention_backend="cpu") as started:
        model = weakref.ref(started.worker._model)
        started.worker.sleep(1)
        assert model() is started.worker._model is not None
        started.worker.sleep(2)
        assert model() is None


def test_a_worker_that_sleeps_can_be_shut_down(tiny_llama: Path) -> None:
    with Started(tiny_llama) as started:
        started.worker.sleep(2)
    with pytest.raises(UsageError, match="shut down"):
        started.executor.collective_rpc("sleep", [1])


def test_the_start_is_not_reported_again(tiny_llama: Path) -> None:
    with Started(tiny_llama) as started:
        num_reports = len(started.reports)
        started.worker.sleep(2)
        started.worker.wake_up()
        assert len(started.reports) == num_reports
        started.worker.report("again", None)
        assert started.reports[-1] == ("again", None)


def test_it_sleeps_on_where_it_cannot_wake_up_and_can_be_woken_later(tmp_path: Path) -> None:
    folder = models.write_tiny_llama(tmp_path / "model")
    with Started(folder) as started:
        before = run(started)
        started.worker.sleep(2)
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(ModelNotFoundError):
            started.worker.wake_up()
        with pytest.raises(UsageError, match="asleep"):
            run(started)
        (tmp_path / "elsewhere").rename(folder)
        started.worker.wake_up()
        assert run(started) == before


def test_another_model_in_the_same_place_is_refused(tmp_path: Path) -> None:
    folder = models.write_tiny_llama(tmp_path / "model")
    with Started(folder) as started:
        started.worker.sleep(2)
        models.write_tiny_llama(folder, num_hidden_layers=1)
        with pytest.raises(CheckpointError, match="another shape"):
            started.worker.wake_up()
        models.write_tiny_llama(folder, seed=1)  # other weights are welcome
        started.worker.wake_up()
        assert run(started)


@pytest.mark.parametrize("level", [1, 2])
def test_memory_that_somebody_else_has_taken_is_told(
    tiny_llama: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Started(tiny_llama) as started:
        before = run(started)
        started.worker.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr(started.worker.platform, "free_memory_bytes", lambda: 1000)
            with pytest.raises(InsufficientMemoryError, match=r"KV blocks need .*call wake_up\(\) again") as caught:
                started.worker.wake_up()
        assert (caught.value.phase, caught.value.available_bytes) == ("wake_up", 1000)
        assert caught.value.needed_bytes == started.info.kv_cache_bytes
        started.worker.wake_up()
        assert run(started) == before


# ---------------------------------------------------------------------------------------- a device with its own memory
class OwnMemory(CpuPlatform):
    """The CPU, as if its memory were not the host's."""

    has_own_memory = True


class CountedRuntime(CpuRuntime):
    """Numbers of a device of 1000 KiB, of which the model takes 200, and a step 300 more."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.free_kib = [900, 700]

    def memory_info(self) -> tuple[int, int]:
        free = self.free_kib.pop(0) if len(self.free_kib) > 1 else self.free_kib[0]
        return free << 10, 1000 << 10

    def allocated_bytes(self) -> int:
        return 150 << 10

    def peak_allocated_bytes(self) -> int:
        self.calls.append("peak")
        return 450 << 10

    def reset_peak(self) -> None:
        self.calls.append("reset_peak")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


class DeviceWorker(Worker):
    """A worker on such a device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.platform = OwnMemory()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> CountedRuntime:
    runtime = CountedRuntime()
    monkeypatch.setattr("asyncllm.worker.worker.make_runtime", lambda device: runtime)
    return runtime


@pytest.fixture
def on_device(tiny_llama: Path, runtime: CountedRuntime) -> Callable[..., Started]:
    def start(**options: Any) -> Started:
        defaults = {"worker_cls": f"{__name__}.DeviceWorker", "attention_backend": "cpu", "dtype": "bfloat16"}
        return Started(tiny_llama, **{**defaults, **options})

    return start


def test_blocks_are_what_a_run_of_the_largest_step_leaves(
    on_device: Callable[..., Started], runtime: CountedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[SchedulerOutput] = []
    run_step = ModelRunner.execute

    def execute(self: ModelRunner, step: SchedulerOutput) -> Any:
        steps.append(step)
        return run_step(self, step)

    monkeypatch.setattr(ModelRunner, "execute", execute)
    with on_device(num_blocks=None, max_num_batched_tokens=103) as started:
        assert started.worker.bytes_per_block == 4 << 10
        assert started.info.num_blocks == (900 - 200 - 300) // 4 - 1
        assert sum(steps[0].num_scheduled_tokens) == steps[0].total_num_tokens == 103
        assert steps[0].num_scheduled_tokens == [26, 26, 26, 25]
        assert [new.num_prompt_tokens for new in steps[0].new_requests] == [26, 26, 26, 25]  # each row draws
        assert runtime.calls == ["synchronize", "empty_cache", "reset_peak", "synchronize", "peak", "empty_cache"]
        assert run(started)

        assert started.info.memory_plan == {
            "whole device": 1000 << 10,
            "weights": 200 << 10,
            "the largest step": 300 << 10,
            "CUDA graphs": 0,
            "KV blocks": 100 * 4 << 10,
        }


def test_what_the_graphs_take_is_measured_on_the_largest_and_comes_off_the_blocks(
    on_device: Callable[..., Started], runtime: CountedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[list[int]] = []
    monkeypatch.setattr("asyncllm.worker.worker.graph_sizes", lambda max_num_rows: [1, 2, 4])
    monkeypatch.setattr(profile_run, "BYTES_PER_GRAPH", 4 << 10)
    monkeypatch.setattr(CpuAttention, "graphs", GraphSupport.DECODE)
    monkeypatch.setattr(CountedRuntime, "can_capture", True)
    monkeypatch.setattr(DecodeGraphs, "drop", lambda self: dropped.append(list(self.sizes)))

    def capture_graphs(self: ModelRunner, *args: Any) -> None:
        if runtime.free_kib == [700]:
            runtime.free_kib = [660, 700]  # while it is there
        captured.append(list(self.graphs.sizes))

    captured: list[list[int]] = []
    monkeypatch.setattr(ModelRunner, "capture_graphs", capture_graphs)
    with on_device(num_blocks=None) as started:
        assert started.info.num_blocks == (900 - 200 - 300 - 40 - 3 * 4) // 4 - 1
        assert started.info.graph_sizes == [1, 2, 4]
        assert captured == [[4], [1, 2, 4]]
        assert dropped == [[4]]
        started.worker.sleep()
        assert dropped == [[4], [1, 2, 4]]
        started.worker.wake_up()
        assert captured[2] == [1, 2, 4]  # the old ones knew the old blocks
    with on_device(num_blocks=None, enforce_eager=True) as started:
        assert started.info.graph_sizes == []


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(16, 3), (3, 16)])
def test_no_graph_has_more_rows_than_a_step(
    on_device: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """It would read and write beyond the ends of its inputs: each row has a token."""
    monkeypatch.setattr(CpuAttention, "graphs", GraphSupport.DECODE)
    monkeypatch.setattr(CountedRuntime, "can_capture", True)
    monkeypatch.setattr(profile_run, "BYTES_PER_GRAPH", 4 << 10)
    monkeypatch.setattr(ModelRunner, "capture_graphs", lambda *_: None)
    with on_device(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens) as started:
        assert started.info.graph_sizes == [1, 2, 3]


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 1}, {"max_model_len": 2}, {"max_num_seqs": 1}])
def test_the_largest_step_of_small_limits_runs_too(on_device: Callable[..., Started], options: dict[str, int]) -> None:
    with on_device(num_blocks=None, **options) as started:
        assert started.info.num_blocks > 0


def test_level_1_moves_the_weights_of_a_device_to_the_host_and_back(on_device: Callable[..., Started]) -> None:
    with on_device() as started:
        before, model = run(started), started.worker._model
        assert isinstance(model, nn.Module)
        places = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        started.worker.sleep(1)
        assert started.worker._is_offloaded
        assert not places & {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        started.worker.wake_up()
        assert model.embed_tokens.weight.data_ptr() == model.lm_head.weight.data_ptr()  # tied as before
        assert run(started) == before
        started.worker.sleep(1)
        started.worker.sleep(2)
        started.worker.wake_up()
        assert run(started) == before


def test_weights_that_the_host_has_no_room_for_stay_and_the_worker_runs(
    on_device: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device() as started:
        before = run(started)
        monkeypatch.setattr(started.worker.platform, "free_memory_bytes", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match=r"weights need .*level=2\) drops them") as caught:
            started.worker.sleep(1)
        assert caught.value.phase == "sleep"
        assert run(started) == before
        started.worker.sleep(2)
        started.worker.wake_up()
        assert run(started) == before


def test_a_move_that_fails_half_way_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    places = [tensor.data_ptr() for tensor in model.parameters()]
    allocate, num_calls = torch.empty_like, 0

    def fail_at_third(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise torch.OutOfMemoryError("full")
        return allocate(*args, **options)

    monkeypatch.setattr(torch, "empty_like", fail_at_third)
    with pytest.raises(torch.OutOfMemoryError):
        offload.move_to_device(model, torch.device("cpu"))
    assert [tensor.data_ptr() for tensor in model.parameters()] == places
    assert offload.weight_bytes(model) == 2 * (4 + 2) * 4


@pytest.mark.parametrize(
    ("place", "error", "phase", "words"),
    [
        (
            "worker.build_model",
            torch.OutOfMemoryError,
            "load_model",
            r"weights in torch\.bfloat16 \(full\); use a smaller",
        ),
        (
            "worker.measure_step_bytes",
            torch.OutOfMemoryError,
            "determine_num_blocks",
            "lower max_num_batched_tokens or",
        ),
        ("worker.ModelRunner", MemoryError, "allocate_kv_cache", r"64 KV blocks \(full\); lower num_blocks"),
    ],
)
def test_memory_that_is_refused_while_starting_is_told_with_its_remedy(
    on_device: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[Exception],
    phase: str,
    words: str,
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error("full\nand a long explanation")

    monkeypatch.setattr(f"asyncllm.worker.{place}", fail)
    monkeypatch.setattr("asyncllm.worker.worker.measure_graph_bytes", lambda *args: 0)
    if place == "worker.ModelRunner":
        monkeypatch.setattr("asyncllm.worker.worker.measure_step_bytes", lambda *args: 0)
    with pytest.raises(InsufficientMemoryError, match=words) as caught, on_device(num_blocks=64):
        pass
    assert caught.value.phase == phase


def test_a_device_that_is_full_keeps_the_engine_asleep_and_its_weights_on_the_host(
    on_device: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device() as started:
        before = run(started)
        started.worker.sleep(1)

        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("full")

        for place in ("worker.move_to_device", "worker.Worker.warm_up"):
            with monkeypatch.context() as patch:
                patch.setattr(f"asyncllm.worker.{place}", fail)
                with pytest.raises((InsufficientMemoryError, torch.OutOfMemoryError), match="full"):
                    started.worker.wake_up()
            assert started.worker._is_offloaded
        started.worker.wake_up()
        assert run(started) == before
