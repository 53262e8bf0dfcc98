"""The attention kernels compiled for GPUs that are not here, by Triton's own tools: what each choice of tile takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

ALL_TILES = "ASYNCLLM_TEST_ALL_TILES"
REPOSITORY = Path(__file__).resolve().parents[4]
CAPABILITIES = [80, 90, 100, 120]
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that one program may have (CUDA C++ programming guide, table of compute capabilities)."""

QUICK = [f"{capability},128,bf16,{name}" for capability in CAPABILITIES for name in ("decode", "prefill")]
QUICK += [f"{capability},64,bf16,{name}" for capability in (80, 90) for name in ("decode", "prefill")]
QUICK += ["90,128,bf16,merge", "90,128,bf16,kv_write"]

VARIANTS = [
    "64,bf16",
    "256,bf16",
    "80,fp16",
    "64,fp32",
    "128,fp32",
    "256,fp32",
    "128,bf16,window=1",
    "128,bf16,softcap=1",
    "256,bf16,window=1,softcap=1",
    "128,bf16,block_size=7",
    "64,bf16,heads=9,kv_heads=3",
    "128,bf16,heads=8,kv_heads=8",
]


def compile_all(wanted: list[str], cache: Path) -> list[dict[str, Any]]:
    """Compile in a process of its own: here, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(REPOSITORY), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_aot", *wanted],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(compiled: dict[str, Any]) -> None:
    assert compiled["stack"] <= (16 if compiled["dtype"] == "fp32" else 0), compiled  # float32 is for comparisons
    assert compiled["shared"] <= SHARED_LIMIT[compiled["capability"]], compiled


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return dict(zip(QUICK, compile_all(QUICK, tmp_path_factory.mktemp("triton")), strict=True))


@pytest.mark.parametrize("wanted", QUICK)
def test_no_register_is_spilled_and_shared_memory_suffices(compiled: dict[str, dict[str, Any]], wanted: str) -> None:
    check(compiled[wanted])


def test_prefill_uses_the_matrix_units_of_each_generation(compiled: dict[str, dict[str, Any]]) -> None:
    instructions = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
    for capability, instruction in instructions.items():
        assert compiled[f"{capability},128,bf16,prefill"][instruction] > 0
    assert compiled["90,64,bf16,prefill"]["wgmma"] > 0


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decode_multiplies_in_matrix_units_and_reads_ahead(
    compiled: dict[str, dict[str, Any]], capability: int
) -> None:
    decode = compiled[f"{capability},128,bf16,decode"]
    assert decode["mma"] > 0
    assert decode["cp_async"] > 0


def test_four_decode_programs_fit_on_a_multiprocessor(compiled: dict[str, dict[str, Any]]) -> None:
    """The persistent grid has four for each; of 9.0, which has 64k registers and 227 KB."""
    decode = compiled["90,128,bf16,decode"]
    assert decode["registers"] * 32 * decode["tile"][2] * 4 <= 1 << 16
    assert decode["shared"] * 4 <= SHARED_LIMIT[90]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not os.environ.get(ALL_TILES), reason=f"compiles for three minutes; run it with {ALL_TILES}=1")
def test_every_other_choice_of_tile(tmp_path: Path) -> None:
    wanted: list[str] = []
    for capability in (80, 86, 89, 90, 100, 120):
        for variant in VARIANTS:
            dim, dtype, *rest = variant.split(",")
            wanted += [",".join([str(capability), dim, dtype, name, *rest]) for name in ("decode", "prefill")]
    for compiled in compile_all(wanted, tmp_path):
        check(compiled)
