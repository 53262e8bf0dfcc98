"""One command that proves the GPU path on a GPU: ``python -m tests.gpu.prove --out FOLDER``.

Phases, the most valuable first, each in a process of its own with a deadline: a fault of the device ends one phase and
not the rest. The JSON in FOLDER is written again after each of them. Needs torch with CUDA, triton and transformers,
and no network. The deadlines add up to 17 minutes (``--only`` picks phases); what it takes is in the report. Exit code
0: every phase that ran has passed.

``--rehearse`` runs the same code on a CPU in Triton's interpreter with tiny shapes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

PHASE_TO_DEADLINE_S = {
    "environment": 60,
    "kernels": 150,
    "parity": 150,
    "graphs": 75,
    "decode": 180,
    "prefill": 75,
    "streams": 120,
    "peer": 120,
    "sampler": 60,
}
REHEARSAL_FACTOR = 3  # an interpreter on a busy machine


def run_phase(name: str, *, rehearse: bool) -> dict[str, Any]:
    """Run one phase in this process."""
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.gpu import checks, rates
    from tests.gpu.rig import Rig

    rig = Rig(rehearse)
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        if name == "parity":
            return checks.parity(rig, Path(folder))
        if name in ("streams", "peer"):
            return getattr(rates, name)(rig, Path(folder))
        return getattr(checks if hasattr(checks, name) else rates, name)(rig)


def run_in_child(name: str, *, rehearse: bool) -> dict[str, Any]:
    """Run one phase in a process of its own; an error or a missed deadline is a result too."""
    deadline_s = PHASE_TO_DEADLINE_S[name] * (REHEARSAL_FACTOR if rehearse else 1)
    command = [sys.executable, "-m", "tests.gpu.prove", "--phase", name, *(["--rehearse"] if rehearse else [])]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    try:
        ran = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        found = {"error": f"took more than {deadline_s} s", "log": _tail(late.stderr)}
        return _last_report(late.stdout) | found | {"passed": False}
    found = {"passed": False, "error": f"exit code {ran.returncode}", "log": _tail(ran.stderr)}
    return _last_report(ran.stdout) or found


def _last_report(output: str | bytes | None) -> dict[str, Any]:
    """Return the last report of a phase: the whole of it, or how far it came."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    for line in reversed(text.splitlines()):
        if line.startswith("{") and line.endswith("}"):
            return json.loads(line)
    return {}


def _tail(text: str | bytes | None) -> str:
    return (text.decode(errors="replace") if isinstance(text, bytes) else text or "")[-4000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for prove.json")
    parser.add_argument("--only", nargs="+", choices=PHASE_TO_DEADLINE_S, help="phases to run")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--phase", choices=PHASE_TO_DEADLINE_S, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase is not None:
        try:
            found = run_phase(options.phase, rehearse=options.rehearse)
        except BaseException as error:  # told to the parent, whatever it is
            traceback.print_exc()
            found = {"passed": False, "error": repr(error)[:2000], "log": traceback.format_exc()[-4000:]}
        print(json.dumps(found), flush=True)
        return 0
    return prove(options.only or list(PHASE_TO_DEADLINE_S), options.out, rehearse=options.rehearse)


def prove(phases: list[str], out: Path | None, *, rehearse: bool) -> int:
    """Run ``phases`` one after the other and return the exit code."""
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": rehearse,
        "host": platform.machine(),
        "phases": {},
    }
    for name in phases:
        begun = time.monotonic()
        found = run_in_child(name, rehearse=rehearse)
        found["took_s"] = round(time.monotonic() - begun, 1)
        report["phases"][name] = found
        print(f"{name}: {'passed' if found['passed'] else 'FAILED'} in {found['took_s']} s", flush=True)
        print(json.dumps(found, indent=1), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "prove.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name, found in report["phases"].items() if not found["passed"]]
    print("failed: " + ", ".join(failed) if failed else "all passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
