"""Every benchmark runs, prints one JSON line and says what it measured; the figures themselves are not judged here."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm.kernels import library

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NOT_RUN_ALONE = {
    "engine_process.py", "peers_table.py", "report.py", "run_all.py", "timed_worker.py", "tiny_model.py", "workload.py",
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]


def run_benchmark(name: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=BENCHMARKS.parent,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def test_every_benchmark_has_a_test_and_a_line_in_the_readme() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for path in BENCHMARKS.glob("*.py"):
        if path.name not in NOT_RUN_ALONE:
            assert f'"{path.name}"' in here
            assert f"benchmarks/{path.name}" in readme


def test_import_cost() -> None:
    figures = run_benchmark("import_cost.py", "--repeats", 1)["figures"]
    assert figures["import"]["torch"] is False
    assert figures["bare"]["seconds"]["median"] <= figures["import"]["seconds"]["median"]


@pytest.mark.model
def test_structured_output(tmp_path: Path) -> None:
    """On a suite of two schemas, one of which cannot be compiled."""
    folder = tmp_path / "tests" / "draft7"
    folder.mkdir(parents=True)
    documents = [{"data": 5, "valid": True}, {"data": "x", "valid": False}]
    cases = [
        {"description": "small", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "tests": documents},
        {"description": "not", "schema": {"not": {}}, "tests": []},
    ]
    (folder / "type.json").write_text(json.dumps(cases))
    figures = run_benchmark("structured_output.py", "--suite", tmp_path, "--drafts", "draft7")["figures"]
    assert figures["coverage"] == {
        "schemas": 2, "compiled": 1, "valid_accepted": 1, "valid_refused": 0, "invalid_refused": 1,
        "invalid_accepted": 0,
    }  # fmt: skip
    assert (figures["generated"]["schemas"], figures["generated"]["valid"]) == (1, 1)


def test_scheduler() -> None:
    figures = run_benchmark("scheduler.py", "--running", 4, "--steps", 8)["figures"]
    assert figures["decode_4"]["step_us"] > 0


def test_wire_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "bytes.svg"
    line = run_benchmark("wire_bytes.py", "--streams", 1, 64, "--plot", plot, "--out", tmp_path / "out.jsonl")
    assert line["figures"]["64"]["bytes_per_token"] < 12
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == line


def test_cpu_kernels() -> None:
    if library.available().isa is None:
        pytest.skip("the native kernels are not compiled")
    small = ["--shape", "tiny", "--rows", 1, 20, "--cases", "2x1@40", "1x20@20", "--seconds", 0.01, "--threads", 2]
    small += ["--attention-cases", "2x1@40"]
    figures = run_benchmark("cpu_kernels.py", "--formats", "BF16", "int4", "Q4_1/int", *small)["figures"]
    assert figures["linear"]["int4"]["layers_20"]["roof"] > 0
    assert figures["linear"]["Q4_1/int"]["head_1"]["roof"] > 0
    assert all(figures["attention"][name]["2x1_of_40"]["roof"] > 0 for name in ("F32", "BF16", "F16", "I8"))
    assert figures["step"]["BF16"]["2x1_of_40"]["tokens_per_s"] > 0


def test_startup(tiny_llama: Path) -> None:
    figures = run_benchmark("startup.py", "--model", tiny_llama, "--repeats", 1)["figures"]
    at = [row["median"] for row in figures["seconds_since_process_start"].values()]
    assert at == sorted(at)


def test_cancel_latency(tiny_llama: Path) -> None:
    figures = run_benchmark("cancel_latency.py", "--model", tiny_llama, "--rounds", 2)["figures"]
    assert figures["caller_ms"]["median"] <= figures["freed_ms"]["median"]


def test_ttft_prefix(tiny_llama: Path) -> None:
    figures = run_benchmark("ttft_prefix.py", "--model", tiny_llama, "--lengths", 64, "--rounds", 1)["figures"]
    assert figures["64"]["cached_tokens"] == 48  # 56 shared ids are three whole blocks of 16


def test_sleep(tiny_llama: Path) -> None:
    figures = run_benchmark("sleep.py", "--model", tiny_llama, "--tokens", 1024)["figures"]
    assert figures["level_1"]["asleep_mib"] <= figures["level_1"]["awake_mib"]
    assert figures["level_2"]["wake_up_s"] > 0


def test_async_scheduling(tiny_llama: Path) -> None:
    arguments = ("--model", tiny_llama, "--streams", 2, "--tokens", 8, "--rounds", 1)
    figures = run_benchmark("async_scheduling.py", *arguments)["figures"]
    assert all(figures["streams_2"][mode]["tokens_per_s"] > 0 for mode in ("off", "on"))


def test_speculation(tiny_llama: Path) -> None:
    arguments = ("--model", tiny_llama, "--streams", 2, "--tokens", 8, "--rounds", 1, "--task", "story")
    figures = run_benchmark("speculation.py", *arguments)["figures"]
    assert figures["story_2"]["same"] is True


def test_shared_cores(tiny_llama: Path) -> None:
    figures = run_benchmark("shared_cores.py", "--model", tiny_llama, "--seconds", 0.3, "--streams", 2)["figures"]
    assert set(figures) == {"default", "shared"}
    assert figures["shared"]["application"] > 0


@pytest.mark.parametrize("executor", ["model", "scripted"])
def test_overhead(executor: str) -> None:
    figures = run_benchmark("overhead.py", "--streams", 1, 4, "--rounds", 1, "--executor", executor)["figures"]
    assert figures["end_to_end"]["4"]["tokens_per_s"] > 0
    assert set(figures["parts"]["4"]) >= {"scheduler_ms_per_step", "worker_ms_per_step", "wire_ms_per_step"}
    if executor == "model":
        load, parts = figures["end_to_end"]["4"], figures["parts"]["4"]
        assert 0 < load["forward_ms"] < load["step_ms"]
        assert 0 < parts["worker_beyond_forward_ms_per_step"] < parts["worker_ms_per_step"]


def test_scaling(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = ["--streams", 1, 4, "--fixed-context", 64, "--contexts", 64, 128, 1024, "--steps", 8]
    figures = run_benchmark("scaling.py", "--model", tiny_llama, *points, "--plot", tmp_path / "plot.svg")["figures"]
    assert list(figures["streams"]) == ["1", "4"]
    assert list(figures["contexts"]) == ["64", "128"]
    assert figures["left_out_contexts"] == [1024]  # this model has 512 positions
    assert 0 < figures["streams"]["4"]["forward_ms"] < figures["streams"]["4"]["step_ms"]
    assert {path.name for path in tmp_path.iterdir()} == {"plot-streams.svg", "plot-contexts.svg"}


def test_accuracy(tiny_llama: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    small = ["--tokens", 256, "--window", 64, "--greedy-tokens", 4, "--variants", "gguf"]
    figures = run_benchmark("accuracy.py", "--model", tiny_llama, *small, "--gguf", tiny_llama)["figures"]
    text = (BENCHMARKS / "text" / "us-constitution.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:256]
    windows = torch.tensor(ids).view(4, 64)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(windows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    assert figures["gguf"]["perplexity"] == pytest.approx(loss.exp().item(), abs=0.001)
    assert figures["gguf"] == {
        "positions": 4 * 63,
        "perplexity": figures["gguf"]["perplexity"],
        "perplexity_change_percent": 0,
        "mean_logprob_distance": 0,
        "same_argmax": 1,
        "same_greedy": 4,
        "prompts": 4,
    }


def test_accuracy_skips_what_cannot_run(tiny_llama: Path) -> None:
    small = ["--tokens", 64, "--window", 64, "--greedy-tokens", 1, "--variants", "exact", "gguf"]
    figures = run_benchmark("accuracy.py", "--model", tiny_llama, *small)["figures"]
    assert figures["exact"]["same_greedy"] == 1
    assert figures["gguf"] == {"skipped": "it reads --gguf, which is not given"}


def test_peers(tiny_llama: Path, tmp_path: Path) -> None:
    """Every engine that is there answers with transformers' ids; the others are named with what is missing."""
    pytest.importorskip("matplotlib")
    small = ["--rounds", 2, "--streams", 2, "--output-tokens", 8, "--long-prompt", 64, "--threads", 1]
    variants = ["--variant", "narrow:max_num_batched_tokens=64", "--variant", "wrong:no_such_option=1"]
    runs = ["asyncllm-exact", "asyncllm-narrow", "asyncllm-wrong", "asyncllm-gguf", "vllm-fp32", "transformers-fp32"]
    absent = ["--python", f"vllm={shutil.which('false')}", "--plot", tmp_path / "bars.svg"]
    line = run_benchmark("peers.py", "--model", tiny_llama, "--only", *runs, *small, *variants, *absent)
    figures = line["figures"]
    for name in ("asyncllm-exact", "asyncllm-narrow", "transformers-fp32"):
        assert "failed" not in figures[name], figures[name]["failed"]
        assert figures[name]["same_ids"] == {"as": "transformers-fp32", "share": 1, "before_difference": 1}
        assert len(figures[name]["rounds"]) == 2
        assert figures[name]["start"]["ready_s"] <= figures[name]["start"]["first_token_s"]
    cancelled = figures["asyncllm-exact"]["rounds"][0]["cancel"]
    assert cancelled["caller_s"] <= cancelled["freed_s"]
    assert figures["asyncllm-narrow"]["options"] == {"max_num_batched_tokens": 64}
    assert "no_such_option" in figures["asyncllm-wrong"]["failed"]
    assert figures["asyncllm-gguf"]["failed"].startswith("skipped")
    assert str(tiny_llama) not in json.dumps(line)
    assert (tmp_path / "bars.svg").is_file()


# ------------------------------------------------------------------------------- what is inside, without any engine
@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of the benchmarks' folder, for this test alone."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)

    def load_module(name: str) -> Any:
        module = importlib.import_module(name)
        for new in set(sys.modules) - before:
            if Path(getattr(sys.modules[new], "__file__", None) or "/").parent == BENCHMARKS:
                monkeypatch.delitem(sys.modules, new)
        return module

    return load_module


def test_prompts_are_reproducible_and_begin_differently(tiny_llama: Path, load: Callable[[str], Any]) -> None:
    workload = load("workload")
    case = workload.Case("some", 40, 64, 8)
    prompts, again = workload.Prompts(str(tiny_llama)), workload.Prompts(str(tiny_llama))
    taken = prompts.of(case)
    assert again.of(case) == taken
    assert {len(prompt) for prompt in taken} == {64}
    assert len({tuple(prompt[:16]) for prompt in taken + prompts.of(case)}) == 80


def test_table_of_peers_counts_times_better_both_ways(load: Callable[[str], Any]) -> None:
    def measured(tokens_per_s: float, first_token_s: float) -> dict[str, Any]:
        alone = {"decode_tokens_per_s": tokens_per_s, "output_tokens_per_s": 1.0, "other_cpus": 0.0}
        first = {"first_token_s": first_token_s, "output_tokens_per_s": 1.0, "other_cpus": 0.5}
        start = {"ready_s": 1.0, "first_token_s": 1.5, "weights_bytes": 1 << 20, "memory": {"kv_cache": 1 << 20}}
        return {
            "start": start | {"peak_rss_bytes": [3 << 20, 1 << 20]},
            "rounds": [{"alone": alone, "first_token": first, "cancel": None}],
        }

    figures = {"asyncllm-exact": measured(200.0, 0.5), "other": measured(50.0, 1.0), "gone": {"failed": "skipped: why"}}
    lines = load("peers_table").table(figures, ["alone", "first_token"]).splitlines()
    assert "| asyncllm-exact | 1.0 | 1.5 | 200 | 500 | – | 4 | 2 | – | 0.50 |" in lines
    assert "| gone | skipped: why |" in lines
    assert lines[-1] == "| asyncllm-exact / other | 4.00 | 2.00 |"


def test_options_are_json_or_text(load: Callable[[str], Any]) -> None:
    options = load("report").options("quantization=int8,num_threads=2,enable_prefix_caching=false")
    assert options == {"quantization": "int8", "num_threads": 2, "enable_prefix_caching": False}
