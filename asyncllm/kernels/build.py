"""Compile the native library: ``python -m asyncllm.kernels.build``, and the hook of ``setup.py``.

Standard library only, and nothing of this package: ``setup.py`` runs this file before the package is installed. Nothing
is ever compiled lazily by an import or by the engine.

Compiler: ``$CXX``, else ``c++``, ``g++``, ``clang++``, else the clang inside the ``ziglang`` wheel. One library per
instruction set comes out, from the same sources; :mod:`asyncllm.kernels.library` chooses by what the machine can run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BuildError", "build", "find_compiler", "isas", "library_path"]

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_DIR = Path(__file__).parent / "lib"

FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",  # what is fused is written in the source: results must not depend on the optimiser
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-fvisibility=hidden",
    "-g0",
    "-pthread",
)
LINK_FLAGS = ("-shared", "-pthread", "-lm")
SANITIZE_FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)


class BuildError(RuntimeError):
    """The compiler failed; the message holds its output."""


def isas(machine: str | None = None) -> tuple[str, ...]:
    """Return the instruction sets to build for on ``machine`` (default: this one), the plainest first."""
    machine = (machine or platform.machine()).lower()
    if machine in ("x86_64", "amd64"):
        return ("generic", "x86-64-v3", "x86-64-v4")
    if machine in ("aarch64", "arm64"):
        return ("neon",)
    return ("generic",)


def library_path(isa: str, directory: Path = LIBRARY_DIR) -> Path:
    """Return where the library for ``isa`` lies."""
    return directory / f"libasyncllm_kernels-{isa}.so"


def find_compiler(chosen: str | None = None) -> list[str] | None:
    """Return the C++ compiler's command: ``chosen`` (what ``$CXX`` says), else what is found; ``None``: nothing."""
    if chosen:
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def build(
    directory: Path = LIBRARY_DIR,
    *,
    compiler: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    sanitize: bool = False,
) -> list[Path]:
    """Compile every instruction set (or ``only`` these) into ``directory`` and return the libraries.

    Each library appears at once, complete, or not at all.

    :raises BuildError: there is no compiler, or it failed.
    """
    command = list(compiler or find_compiler() or ())
    if not command:
        raise BuildError("no C++ compiler: set CXX, install g++ or clang, or `pip install ziglang`")
    wanted = tuple(only or isas())
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        sources = sorted(SOURCE_DIR.glob("*.cpp"), key=lambda source: -source.stat().st_size)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = {
                isa: [pool.submit(_compile, command, isa, source, Path(scratch), sanitize) for source in sources]
                for isa in wanted
            }
            return [_link(command, isa, [job.result() for job in jobs[isa]], directory, sanitize) for isa in wanted]


def _compile(command: Sequence[str], isa: str, source: Path, scratch: Path, sanitize: bool) -> Path:
    output = scratch / f"{source.stem}-{isa}.o"
    _run([*command, *FLAGS, *_march(command, isa), *_sanitize(sanitize), "-c", str(source), "-o", str(output)])
    return output


def _link(command: Sequence[str], isa: str, objects: Sequence[Path], directory: Path, sanitize: bool) -> Path:
    final = library_path(isa, directory)
    temporary = objects[0].with_name(final.name)
    needed = () if sys.platform == "darwin" else ("-Wl,--as-needed",)  # no C++ runtime is used, so none gets linked
    flags = [*needed, *_march(command, isa), *_sanitize(sanitize)]
    _run([*_linker(command), *flags, *map(str, objects), *LINK_FLAGS, "-o", str(temporary)])
    temporary.replace(final)
    return final


def _linker(command: Sequence[str]) -> list[str]:
    """Return the command that links: zig's C++ driver would compile its whole C++ library first, and none is needed."""
    return ["cc" if part == "c++" and "ziglang" in command else part for part in command]


def _sanitize(sanitize: bool) -> Sequence[str]:
    return SANITIZE_FLAGS if sanitize else ()


def _march(command: Sequence[str], isa: str, machine: str | None = None) -> list[str]:
    """Return what makes the compiler aim at ``isa``: said always, since some aim at this very machine by default."""
    if len(isas(machine)) == 1:
        return []
    name = "x86-64" if isa == "generic" else isa
    return [f"-march={name.replace('-', '_') if 'ziglang' in command else name}"]  # zig spells it x86_64_v3


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}".rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Build into the package, print the libraries, return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncllm.kernels.build", description=main.__doc__)
    parser.add_argument("--isa", action="append", choices=isas(), help="only this instruction set (may be repeated)")
    parser.add_argument("--output", type=Path, default=LIBRARY_DIR)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    options = parser.parse_args(arguments)
    from asyncllm import env  # setup.py runs this file without the package

    try:
        compiler = find_compiler(env.cxx())
        paths = build(options.output, compiler=compiler, only=options.isa, sanitize=options.sanitize)
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{path}\n" for path in paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
