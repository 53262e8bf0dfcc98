"""How long from the start of a process to its first token, and where does the time go?

    python benchmarks/startup.py [--model FILE] [--repeats 3]

A fresh interpreter runs the quickstart: import, start, one token of a short prompt. Files are warm (one run before).
The caller's clock starts when the kernel created the process; the engine's phases are its own report.
"""

from __future__ import annotations

import json
import subprocess
import sys

import report

PROGRAM = """
import json, os, sys, time
def age():
    begun = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun
at = {"interpreter": age()}
import asyncllm
async def main():
    llm = asyncllm.AsyncLLM(sys.argv[1])
    at["import"] = age()
    await llm.start()
    at["ready"] = age()
    async for token in llm.stream("The capital of France is", max_tokens=2, temperature=0):
        at.setdefault("first_token", age())
    info = llm.info
    await llm.aclose()
    at["closed"] = age()
    print(json.dumps({"at": at, "engine": dict(info.phase_to_seconds)}))
asyncllm.run(main)
"""


def run_once(model: str) -> tuple[dict[str, float], dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model], check=True, stdout=subprocess.PIPE, text=True, cwd=report.REPOSITORY
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["at"], found["engine"]


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    run_once(args.model)
    runs = [run_once(args.model) for _ in range(args.repeats)]
    figures = {
        "seconds_since_process_start": {name: report.spread([at[name] for at, _ in runs], 2) for name in runs[0][0]},
        "engine_phases_s": {name: report.spread([phases[name] for _, phases in runs], 2) for name in runs[0][1]},
    }
    report.emit("startup", figures, args)


if __name__ == "__main__":
    main()
