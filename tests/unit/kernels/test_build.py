"""Building and finding the library; what the compiler made of it; the C header against its Python mirror."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm import env
from asyncllm.errors import ConfigError
from asyncllm.kernels import build, library, selector

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "allm_linear": library.CLinear,
    "allm_norm": library.CNorm,
    "allm_kv_cache": library.CKvCache,
    "allm_rotary": library.CRotary,
    "allm_batch": library.CBatch,
    "allm_layer": library.CLayer,
    "allm_decoder": library.CDecoder,
    "allm_step_output": library.CStepOutput,
}


# ---- the package -----------------------------------------------------------------------------------------------------


def test_the_best_library_that_runs_here_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCLLM_KERNELS", raising=False)
    assert library.available().isa == library.usable()[-1]
    assert selector.make_kernels(2).name == "native"
    assert selector.make_kernels(2).description == f"native {library.usable()[-1]}, 2 threads"


def test_a_variable_chooses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_KERNELS", library.usable()[0])
    assert library.load().allm_isa().decode() == library.usable()[0]


def test_a_variable_switches_the_library_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_KERNELS", "off")
    assert selector.make_kernels(2).name == "torch"
    assert "ASYNCLLM_KERNELS=off" in selector.describe_kernels()
    assert "slower" in selector.make_kernels(2).description
    with pytest.raises(RuntimeError, match="switched off"):
        library.load()


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_KERNELS", "mmx")
    with pytest.raises(ConfigError, match="'mmx'; compiled and able to run here are: "):
        library.available()


def test_without_a_library_torch_runs_and_says_how_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ASYNCLLM_KERNELS", raising=False)
    monkeypatch.setattr(library, "library_dir", lambda: tmp_path)
    assert selector.make_kernels(2).name == "torch"
    assert "python -m asyncllm.kernels.build" in selector.describe_kernels()


def test_describing_the_kernels_needs_no_torch() -> None:
    use = "from asyncllm.kernels import selector; selector.describe_kernels()"
    code = f"import sys; {use}; assert 'torch' not in sys.modules"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


# ---- the compiler ----------------------------------------------------------------------------------------------------


def test_the_compiler_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false --my-option")
    assert build.find_compiler(env.cxx()) == ["false", "--my-option"]
    assert build.main(["--output", str(tmp_path)]) == 1


def test_no_compiler_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda *_: None)
    with pytest.raises(build.BuildError, match="ziglang"):
        build.build(tmp_path)
    assert build.main(["--output", str(tmp_path)]) == 1
    assert "ziglang" in capsys.readouterr().err


def test_a_failing_compiler_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="-std="):
        build.build(tmp_path, compiler=["false"])
    assert list(tmp_path.iterdir()) == []


def test_machines_get_their_instruction_sets() -> None:
    assert build.isas("x86_64") == ("generic", "x86-64-v3", "x86-64-v4")
    assert build.isas("arm64") == ("neon",)
    assert build.isas("riscv64") == ("generic",)


@needs_compiler
@pytest.mark.slow
def test_a_build_makes_libraries_that_load(tmp_path: Path) -> None:
    (path,) = build.build(tmp_path, only=build.isas()[:1])
    assert path.parent == tmp_path
    assert library.open_library(path).allm_isa().decode() == build.isas()[0]
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@needs_compiler
def test_the_python_structs_are_those_of_the_header(tmp_path: Path) -> None:
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "asyncllm_kernels.h"', "int main() {"]
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        fields = [field[0] for field in struct._fields_]
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields]
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([*compiler, f"-I{build.SOURCE_DIR}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    expected: list[str] = []
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        expected.extend(f"{name}.{field[0]} {getattr(struct, field[0]).offset}" for field in struct._fields_)
    assert printed.splitlines() == expected


def test_every_function_of_the_header_is_typed() -> None:
    header = (build.SOURCE_DIR / "asyncllm_kernels.h").read_text()
    declared = re.findall(r"^ALLM_API [^;(]*?\b(allm_\w+)\(", header, re.MULTILINE)
    assert set(declared) == set(library.FUNCTIONS)
    version = re.search(r"#define ALLM_ABI_VERSION (\d+)", header)
    assert version is not None
    assert int(version[1]) == library.ABI_VERSION


def test_a_library_of_another_version_is_not_used_and_says_how_to_make_a_new_one(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    library.open_library.cache_clear()
    try:
        found = library.available()
    finally:
        library.open_library.cache_clear()
    assert found.isa is None
    assert "asyncllm.kernels.build" in found.reason


# ---- what the compiler made ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_no_micro_kernel_spills_an_accumulator(isa: str, libraries: Path) -> None:
    if isa not in ("x86-64-v3", "x86-64-v4"):
        pytest.skip("read from x86 code with fused multiply-add")
    if "asan" in build.library_path(isa, libraries).read_bytes().decode("latin1"):
        pytest.skip("a build with sanitizers")
    num_loops, spilling = find_spills(build.library_path(isa, libraries))
    assert num_loops > 100
    assert spilling == []


def find_spills(path: Path) -> tuple[int, list[str]]:
    """Return how many inner loops of micro-kernels there are, and which store a vector register to the stack.

    An accumulator that does not fit into the registers is stored and loaded in every round: half the speed (seen with
    gcc 12 and tiles of 6 x 2 vectors). The fp32 sums of integer tiles are on the stack, outside of their inner loops.
    """
    text = subprocess.run(
        ["objdump", "-dC", "--no-show-raw-insn", str(path)], check=True, capture_output=True, text=True
    ).stdout
    num_loops, spilling = 0, []
    for name, body in re.findall(r"^[0-9a-f]+ <(.*?)>:\n((?:\s+[0-9a-f]+:.*\n)+)", text, re.MULTILINE):
        if not re.search(r"::(tile|integer_tile|score|weigh|soften|soften_block)<", name):
            continue
        code = [(int(at, 16), what) for at, what in re.findall(r"^\s+([0-9a-f]+):\s+(.*)$", body, re.MULTILINE)]
        for loop in inner_loops(code):
            num_loops += 1
            if any(re.search(r"%[xyz]mm\d+,-?(0x[0-9a-f]+)?\(%r[sb]p", what) for what in loop):
                spilling.append(name.partition("(float const")[0])
    return num_loops, spilling


def inner_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """Return the instructions of each innermost loop that multiplies and adds: the integers of pairs, or else fp32."""
    pairs = [at for at, what in code if re.match(r"vpmaddwd|(\{vex\} )?vpdpwssd", what)]
    fused = pairs or [at for at, what in code if what.startswith("vfmadd")]
    loops: list[tuple[int, int]] = []
    for at, what in code:
        jump = re.match(r"j\w+\s+([0-9a-f]+)", what)
        if jump and code[0][0] <= int(jump[1], 16) <= at and any(int(jump[1], 16) <= f <= at for f in fused):
            loops.append((int(jump[1], 16), at))
    inner = [loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    return [[what for at, what in code if first <= at <= last] for first, last in inner]
