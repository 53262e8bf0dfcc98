"""Run the kernel tests on libraries built with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/support/sanitize_kernels.py [pytest arguments]

Needs gcc, or clang with its runtime as a shared library. Every access beyond a tensor, a buffer of the step or a
thread's scratch memory ends the run. Uses a temporary folder; leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncllm import env
from asyncllm.kernels import build

REPOSITORY = Path(__file__).resolve().parents[2]
RUNTIMES = ("libasan.so", "libubsan.so")
NOT_SANITIZED = "not spills and not compiler and not build"  # these look at builds, not at what kernels do


def main(arguments: list[str]) -> int:
    compiler = build.find_compiler(env.cxx())
    if compiler is None:
        print("no C++ compiler", file=sys.stderr)
        return 1
    preload = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in RUNTIMES
    ]
    with tempfile.TemporaryDirectory() as folder:
        build.build(Path(folder), compiler=compiler, sanitize=True)
        environment = dict(
            os.environ,
            ASYNCLLM_TEST_KERNELS=folder,
            ASAN_OPTIONS="detect_leaks=0:halt_on_error=1",  # Python's own allocations live until the end
            UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
            LD_PRELOAD=":".join(preload),
            OMP_NUM_THREADS="1",
        )
        tests = [sys.executable, "-m", "pytest", "tests/unit/kernels", "-k", NOT_SANITIZED, "-p", "no:faulthandler"]
        return subprocess.run([*tests, *arguments], cwd=REPOSITORY, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
