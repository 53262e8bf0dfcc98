"""The runner on a GPU that is not there: no step waits for the device, mixes host and device, or copies twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fake_cuda, models

KINDS = ["greedy", "random", "adjusted"]
NUM_STEPS, NUM_DECODE_STEPS = 7, 5

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = fake_cuda.compile_guard(tmp_path_factory.mktemp("guard"))
    if library is None:
        pytest.skip("no C++ compiler to build the device guard with")
    return library


def write_models(folder: Path) -> list[Path]:
    folders = [folder / name for name in ("llama", "opt", "gemma3")]
    for each in folders:
        each.mkdir()
    models.write_tiny_llama(folders[0], vocab_size=2048)  # more than the window in which top-p is looked for first
    models.write_tiny_opt(folders[1])
    models.write_tiny_gemma3(folders[2])
    return folders


@pytest.mark.parametrize(
    ("backends", "names", "fused"),
    [
        (["triton"], ["llama", "opt", "gemma3"], "triton"),
        (["triton"], ["llama", "opt", "gemma3"], "torch"),
        (["flash_attn 2", "flash_attn 3", "flash_attn 4"], ["gemma3"], "triton"),  # which has windows
    ],
    ids=["triton", "triton, the rest in torch", "flash_attn"],
)
def test_a_step_never_waits_for_the_device(
    backends: list[str], names: list[str], fused: str, guard: Path, tmp_path: Path
) -> None:
    folders = [folder for folder in write_models(tmp_path) if folder.name in names]
    program = [sys.executable, "-m", "tests.support.fake_cuda", str(guard), ",".join(backends), *map(str, folders)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "ASYNCLLM_FUSED_KERNELS": fused}
    ran = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(f["model"], f["backend"], f["graphs"], f["kind"]) for f in found] == [
        (folder.name, backend, graphs, kind)
        for folder in folders
        for backend in backends
        for graphs in (False, True)
        for kind in KINDS
    ]
    assert all(f["copies"] == NUM_STEPS for f in found)
    assert all(f["replays"] == (NUM_DECODE_STEPS if f["graphs"] else 0) for f in found)
