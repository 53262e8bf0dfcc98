from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError, InsufficientMemoryError, ModelNotFoundError, UsageError
from asyncllm.executor.base import Executor, ExecutorInfo
from asyncllm.executor.uniproc import UniProcExecutor
from asyncllm.kernels import library
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.input_batch import InputBatch
from asyncllm.worker.worker import Worker
from tests.support.sampling import sampling


class Started:
    """A started executor on the tiny Llama, with what it reported."""

    def __init__(self, model: Path, **options: object) -> None:
        self.reports: list[tuple[str, float | None]] = []
        defaults = {"max_num_seqs": 4, "num_threads": 1, "num_blocks": 64}
        config = EngineConfig.from_options(str(model), **{**defaults, **options})
        self.executor = Executor.get_class(config)(
            config, lambda phase, fraction: self.reports.append((phase, fraction))
        )

    def __enter__(self) -> Started:
        self.info: ExecutorInfo = self.executor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()

    @property
    def worker(self) -> Worker:
        return self.executor._worker  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def batch(self) -> InputBatch:
        return self.worker._runner.batch  # pyright: ignore[reportOptionalMemberAccess]


@pytest.fixture(scope="module", params=["native", "cpu"])
def started(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Started]:
    if request.param == "native" and (reason := library.available().reason):
        pytest.skip(f"the native kernels are {reason}")
    with Started(tiny_llama, attention_backend=request.param) as started:
        assert started.info.attention_backend == request.param
        yield started


def test_auto_takes_the_compiled_kernels_where_they_are(tiny_llama: Path) -> None:
    with Started(tiny_llama) as started:
        native = library.available().isa is not None
        assert started.info.attention_backend == ("native" if native else "cpu")
        assert started.info.kernels.startswith("native" if native else "torch")


def test_asking_for_kernels_that_are_not_compiled_says_so(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_KERNELS", "off")
    with (
        pytest.raises(ConfigError, match="attention_backend is 'native'"),
        Started(tiny_llama, attention_backend="native"),
    ):
        pass
    with Started(tiny_llama) as started:  # and unasked, torch does it
        assert (started.info.attention_backend, started.info.kernels) == ("cpu", "torch")


@pytest.mark.parametrize(("kv_cache_dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_keys_and_values_are_stored_as_asked(
    started: Started, tiny_llama: Path, kv_cache_dtype: str, num_bytes: int
) -> None:
    backend, plain = started.info.attention_backend, started.worker.bytes_per_block
    with Started(tiny_llama, attention_backend=backend, kv_cache_dtype=kv_cache_dtype) as other:
        assert (other.info.kv_cache_dtype, other.info.attention_backend) == (kv_cache_dtype, backend)
        assert other.worker.bytes_per_block == plain * num_bytes // 4
        assert other.info.kv_cache_bytes == 65 * other.worker.bytes_per_block
        other.executor.execute_model(first_step(0, [5, 6, 7], 3)).result()
    assert started.info.kv_cache_dtype == "float32"


def test_int8_keys_and_values_need_the_compiled_kernels(tiny_llama: Path) -> None:
    if library.available().isa is not None:
        with Started(tiny_llama, kv_cache_dtype="int8") as started:
            assert (started.info.kv_cache_dtype, started.info.attention_backend) == ("int8", "native")
    for backend in ("cpu", "reference"):
        with (
            pytest.raises(ConfigError, match=f"{backend}: kv_cache_dtype is 'int8', which needs the native kernels"),
            Started(tiny_llama, kv_cache_dtype="int8", attention_backend=backend),
        ):
            pass


@pytest.mark.parametrize("options", [{"attention_backend": "cpu"}, {"dtype": "bfloat16"}, {}])
def test_quantization_that_torch_cannot_do_is_refused_with_the_reason(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if not options:
        monkeypatch.setenv("ASYNCLLM_KERNELS", "off")
    reason = "runs on torch" if options else "ASYNCLLM_KERNELS=off"
    with (
        pytest.raises(ConfigError, match=f"quantization is 'int8'.*{reason}") as caught,
        Started(tiny_llama, quantization="int8", **options),
    ):
        pass
    assert caught.value.parameter == "quantization"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_engine_says_so_and_runs(tiny_llama: Path, quantization: str) -> None:
    if reason := library.available().reason:
        pytest.skip(f"the native kernels are {reason}")
    with Started(tiny_llama, quantization=quantization) as started:
        assert started.info.kernels.endswith(f", quantization {quantization}")
        assert len(started.executor.execute_model(first_step(0, [5, 6, 7], 3)).result().token_ids) == 1


def first_step(slot: int, prompt: list[int], block: int) -> SchedulerOutput:
    request = NewRequest(slot, 1, prompt, len(prompt), 0, [block], sampling())
    return SchedulerOutput(1, [slot], [len(prompt)], len(prompt), [request])


def test_start_says_what_was_found_and_how_long_each_phase_took(started: Started, tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    info = started.info
    assert info.vocab_size == config["vocab_size"]
    assert info.max_model_len == min(config["max_position_embeddings"], 64 * 16)
    assert info.num_blocks == 64
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    assert info.kv_cache_bytes >= 65 * 16 * per_token  # heads may be padded to whole vectors
    assert (info.device, info.dtype) == ("cpu", "float32")
    phases = ["import_worker", "init_device", "load_model", "determine_num_blocks", "allocate_kv_cache", "warm_up"]
    assert list(info.phase_to_seconds) == phases
    assert [phase for phase, fraction in started.reports if fraction is None] == phases
    fractions = [fraction for phase, fraction in started.reports if phase == "load_model" and fraction is not None]
    assert fractions == sorted(fractions)
    assert 0.9 < fractions[-1] <= 1


def test_a_step_gives_the_same_tokens_on_both_backends(started: Started, tiny_llama: Path) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    with Started(tiny_llama, attention_backend="reference") as other:
        assert other.info.attention_backend == "reference"
        tokens = [
            executor.execute_model(first_step(0, prompt, 3)).result().token_ids
            for executor in (started.executor, other.executor)
        ]
    started.executor.execute_model(SchedulerOutput(2, [0], [1], 1)).result()
    started.executor.collective_rpc("execute_model", [SchedulerOutput(3, [0], [1], 1)])[0].result()
    started.batch.apply(SchedulerOutput(4, [], [], 0, freed_slots=[0]))
    assert tokens[0] == tokens[1]


def test_warm_up_leaves_an_empty_batch(tiny_llama: Path) -> None:
    with Started(tiny_llama, max_num_batched_tokens=1, num_blocks=2, block_size=1, max_num_seqs=1) as started:
        assert started.info.max_model_len == 2
        assert not started.batch.slot_to_request_id
        assert not started.batch.block_table.ids.any()


def test_profile_writes_a_trace_file(started: Started, tmp_path: Path) -> None:
    executor = started.executor
    with pytest.raises(UsageError, match="no profile"):
        executor.collective_rpc("stop_profile")
    executor.collective_rpc("start_profile", [str(tmp_path / "traces")])
    with pytest.raises(UsageError, match="already"):
        executor.collective_rpc("start_profile", [str(tmp_path)])
    executor.execute_model(first_step(1, [1, 2, 3], 1)).result()
    started.batch.apply(SchedulerOutput(4, [], [], 0, freed_slots=[1]))
    [path] = executor.collective_rpc("stop_profile")
    assert Path(path).parent == tmp_path / "traces"
    names = {event.get("name") for event in json.loads(Path(path).read_text())["traceEvents"]}
    assert "step of 3 tokens in 1 rows" in names


@pytest.mark.parametrize("method", ["no_such_method", "_runner", "__init__", "vocab_size"])
def test_collective_rpc_calls_public_methods_only(started: Started, method: str) -> None:
    with pytest.raises(AttributeError, match=method):
        started.executor.collective_rpc(method)


def test_threads_are_set_for_the_engine_and_put_back(tiny_llama: Path) -> None:
    before = torch.get_num_threads()
    with Started(tiny_llama, num_threads=before + 1, attention_backend="cpu"):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_shutdown_is_idempotent_and_ends_everything(tiny_llama: Path) -> None:
    with Started(tiny_llama) as started:
        pass
    started.executor.shutdown()
    started.executor.check_health()
    with pytest.raises(UsageError, match="shut down"):
        started.executor.execute_model(SchedulerOutput(1, [], [], 0))


def test_a_failed_start_can_be_shut_down(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    started = Started(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError), started:
        pass
    started.executor.shutdown()
    assert torch.get_num_threads() == before


def test_max_model_len_beyond_the_models_positions_is_refused(tiny_llama: Path) -> None:
    with (
        pytest.raises(ConfigError, match="max_model_len is 100000") as caught,
        Started(tiny_llama, max_model_len=100_000),
    ):
        pass
    assert caught.value.parameter == "max_model_len"


def test_a_length_that_does_not_fit_says_what_would(tiny_llama: Path) -> None:
    options = {"num_blocks": None, "kv_cache_bytes": 100_000, "max_model_len": 256}
    with pytest.raises(InsufficientMemoryError) as caught, Started(tiny_llama, **options):
        pass
    fit = caught.value.max_model_len_fit
    assert fit is not None
    with Started(tiny_llama, **{**options, "max_model_len": fit}) as started:
        assert started.info.max_model_len == fit


def test_half_precision_runs(tiny_llama: Path) -> None:
    with Started(tiny_llama, dtype="bfloat16") as started:
        assert started.info.dtype == "bfloat16"
        assert started.executor.execute_model(first_step(0, [1, 2, 3], 1)).result().token_ids[0] >= 0


class OtherWorker(Worker):
    """Stands for a worker class of a user's package."""


def test_worker_cls_is_a_name_resolved_where_the_worker_runs(tiny_llama: Path) -> None:
    name = f"{OtherWorker.__module__}.OtherWorker"
    with Started(tiny_llama, worker_cls=name) as started:
        assert type(started.worker).__name__ == "OtherWorker"
    with (
        pytest.raises(ConfigError, match=r"worker_cls names 'no\.such\.Worker'"),
        Started(tiny_llama, worker_cls="no.such.Worker"),
    ):
        pass


def test_uniproc_is_the_default_executor() -> None:
    assert Executor.get_class(EngineConfig.from_options("model")) is UniProcExecutor
