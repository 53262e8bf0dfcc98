"""The script that proves the GPU path, rehearsed: no minute of a GPU is to be lost to a slip in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import prove

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("phase", prove.PHASE_TO_DEADLINE_S)
def test_every_phase_passes_in_its_rehearsal(phase: str) -> None:
    found = prove.run_in_child(phase, rehearse=True)
    assert found["passed"], json.dumps(found, indent=1)


def test_what_fails_or_takes_too_long_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, *, rehearse: bool) -> dict[str, Any]:
        return {"passed": name != "kernels"}

    monkeypatch.setattr(prove, "run_in_child", run)
    assert prove.prove(["kernels", "parity"], tmp_path, rehearse=True) == 1
    assert "failed: kernels" in capsys.readouterr().out
    report = json.loads((tmp_path / "prove.json").read_text())
    assert [found["passed"] for found in report["phases"].values()] == [False, True]


def test_a_deadline_ends_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prove.PHASE_TO_DEADLINE_S, "environment", 0)
    found = prove.run_in_child("environment", rehearse=True)
    assert not found["passed"]
    assert "took more than 0 s" in found["error"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_path_on_a_gpu(tmp_path: Path) -> None:
    assert prove.prove(list(prove.PHASE_TO_DEADLINE_S), tmp_path, rehearse=False) == 0
