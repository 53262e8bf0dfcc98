"""How long does `import asyncllm` take, and how much memory, next to a bare interpreter?

    python benchmarks/import_cost.py [--repeats 15]

Fresh interpreters, one after the other, the three variants in turn. "names": every public name resolved, which loads
the whole caller's side (tokenizers, zmq, anyio). Bytecode is cached, files are warm. Memory is the peak of resident
memory.
"""

from __future__ import annotations

import subprocess
import sys

import report

VARIANTS = {
    "bare": "pass",
    "import": "import asyncllm",
    "names": "import asyncllm; [getattr(asyncllm, name) for name in asyncllm.__all__]",
}
MEASURE = """
import time
begun = time.perf_counter()
{code}
took = time.perf_counter() - begun
import sys
peak_kib = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, peak_kib / 1024, len(sys.modules), "torch" in sys.modules)
"""


def run_once(code: str) -> tuple[float, float, int, bool]:
    out = subprocess.run(
        [sys.executable, "-c", MEASURE.format(code=code)],
        check=True,
        capture_output=True,
        text=True,
        cwd=report.REPOSITORY,
    )
    took_s, peak_mib, modules, torch = out.stdout.split()
    return float(took_s), float(peak_mib), int(modules), torch == "True"


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    rows: dict[str, list[tuple[float, float, int, bool]]] = {name: [] for name in VARIANTS}
    for code in VARIANTS.values():
        run_once(code)  # warms the files
    for _ in range(args.repeats):
        for name, code in VARIANTS.items():
            rows[name].append(run_once(code))
    figures = {
        name: {
            "seconds": report.spread([row[0] for row in runs]),
            "rss_mib": report.spread([row[1] for row in runs], 1),
            "modules": runs[-1][2],
            "torch": runs[-1][3],
        }
        for name, runs in rows.items()
    }
    report.emit("import_cost", figures, args)


if __name__ == "__main__":
    main()
