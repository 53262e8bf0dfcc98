"""Every benchmark runs, prints one JSON line and says what it measured; the figures themselves are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncllm.kernels import library

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NOT_RUN_ALONE = {"report.py", "run_all.py", "tiny_model.py", "peers_driver.py"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]

HARNESS = '''
"""The least that a workload harness gives its drivers."""
import argparse, asyncio, json, sys

class Driver:
    def add_arguments(self, parser): ...

def main(driver):
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    driver.add_arguments(parser)
    args = parser.parse_args()
    asyncio.run(run(driver, args))

async def run(driver, args):
    await driver.start(args, json.load(open(args.workload)))
    counts = [count async for count, text in driver.stream([65, 66, 67], 8)]
    cancelled = await driver.cancel([65, 66, 67])
    await driver.close()
    print(json.dumps({"tokens": sum(counts), "cancel": cancelled}))
'''


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
    figures = run_benchmark("cpu_kernels.py", "--formats", "BF16", "int4", "Q4_1/int", *small)["figures"]
    assert figures["linear"]["int4"]["layers_20"]["roof"] > 0
    assert figures["linear"]["Q4_1/int"]["head_1"]["roof"] > 0
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


@pytest.mark.parametrize("executor", ["model", "scripted"])
def test_overhead(executor: str) -> None:
    figures = run_benchmark("overhead.py", "--streams", 1, 4, "--rounds", 1, "--executor", executor)["figures"]
    assert figures["end_to_end"]["4"]["tokens_per_s"] > 0
    assert set(figures["parts"]["4"]) >= {"scheduler_ms_per_step", "worker_ms_per_step", "wire_ms_per_step"}


def test_peers_driver(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "harness.py").write_text(HARNESS, encoding="utf-8")
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"model": str(tiny_llama), "max_len": 512}), encoding="utf-8")
    line = run_benchmark("peers_driver.py", "--harness", tmp_path, "--workload", workload)
    assert line["tokens"] == 8
    assert line["cancel"]["caller_s"] <= line["cancel"]["freed_s"]
