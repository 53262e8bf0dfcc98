"""Run every benchmark but the comparison with other engines; one JSON line each, appended to --out where given.

python benchmarks/run_all.py [--model FILE] [--out benchmarks/results/NAME.jsonl] [--only NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import report

HERE = Path(__file__).resolve().parent
RUNS: dict[str, list[str]] = {
    "import_cost": [],
    "scheduler": [],
    "wire_bytes": [],
    "cpu_kernels": [],
    "startup": ["--model"],
    "cancel_latency": ["--model"],
    "ttft_prefix": ["--model"],
    "shared_cores": ["--model"],
    "scaling": ["--model"],
    "accuracy": ["--model"],
    "sleep": ["--model"],
    "async_scheduling": ["--model"],
    "speculation": ["--model"],
    "overhead": [],
    "overhead_scripted": ["--executor", "scripted"],
}


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--only", nargs="*", choices=list(RUNS), help="default: all")
    args = parser.parse_args()
    failed = []
    for name, extra in RUNS.items():
        if args.only and name not in args.only:
            continue
        command = [sys.executable, str(HERE / f"{name.removesuffix('_scripted')}.py"), *extra]
        command += [args.model] if extra == ["--model"] else []
        command += ["--out", str(args.out)] if args.out else []
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
