"""The fused and sampling kernels compile for GPUs that are not here, and need no memory for registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("group", ["fused", "sample"])
def test_kernels_compile_without_spilling(group: str, tmp_path: Path) -> None:
    """In a process of its own: in this one, triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", group],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {used["architecture"] for used in found} == {80, 90}
    assert [used for used in found if used["stack"]] == []
