"""The import rules, read from the source: which room may import which, and where torch may be.

    errors, env, outputs, sampling_params, wire       stdlib and msgspec
    config, checkpoint                                those (checkpoint also reads files; no torch)
    frontend, client, core, structured, executor …    no torch; each its own libraries
    worker, models, layers, attention, ...            torch

An import under ``TYPE_CHECKING`` binds nothing at run time and is free. What the rules promise, a caller's process
without torch, is checked once more by importing it all.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "asyncllm"
HEAVY = ("torch", "transformers", "numpy", "safetensors")

CONTRACTS = {"errors", "env", "outputs", "sampling_params", "wire"}
BASE = CONTRACTS | {"config"}

# room -> (rooms it may import, third-party packages it may import)
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), {"msgspec"}),
    "env": (set(), set()),
    "outputs": (set(), {"msgspec"}),
    "sampling_params": ({"errors"}, {"msgspec"}),
    "wire": ({"errors"}, {"msgspec"}),
    "config": (CONTRACTS, {"msgspec"}),
    "checkpoint": ({"errors", "env"}, {"msgspec"}),
    "frontend": (BASE | {"checkpoint"}, {"msgspec", "tokenizers", "jinja2", "markupsafe", "anyio"}),
    "client": (BASE | {"checkpoint"}, {"msgspec", "zmq", "anyio", "sniffio"}),
    "core": (BASE | {"structured"}, {"msgspec", "zmq"}),
    "structured": (BASE | {"checkpoint", "frontend"}, {"llguidance", "msgspec"}),
    "executor": (BASE | {"platforms"}, {"msgspec"}),
    "platforms": (BASE, {"msgspec", "torch", "psutil"}),
    "kernels": (BASE, {"torch", "numpy", "triton"}),
    "attention": (BASE | {"kernels", "platforms"}, {"torch", "numpy", "flash_attn", "flash_attn_interface"}),
    "layers": (BASE | {"attention", "kernels"}, {"torch", "numpy"}),
    "loader": (BASE | {"checkpoint", "kernels"}, {"torch", "numpy", "safetensors"}),
    "models": (
        BASE | {"checkpoint", "layers", "attention", "loader", "kernels"},
        {"torch", "numpy", "msgspec", "transformers"},
    ),
    "sampling": (BASE | {"kernels"}, {"torch", "numpy"}),
    "distributed": (BASE, {"torch", "numpy"}),
    "worker": (
        BASE
        | {"checkpoint", "models", "loader", "layers", "attention", "sampling", "platforms", "kernels", "distributed"},
        {"torch", "numpy", "msgspec"},
    ),
    "_event_loop": ({"errors"}, set()),
    "token_stream": (BASE | {"frontend", "_event_loop"}, {"anyio", "msgspec"}),
    "_request": (BASE | {"frontend"}, {"msgspec"}),
    "_session": (BASE | {"frontend", "client", "token_stream", "_event_loop"}, {"anyio"}),
    "_start": (BASE | {"frontend", "client", "checkpoint", "_event_loop", "_session"}, {"anyio"}),
    "async_llm": (
        BASE
        | {"frontend", "client", "checkpoint", "token_stream", "_event_loop", "_request", "_session", "_start"}
        | {"_fan_out"},
        {"anyio", "uvloop"},
    ),
    "_branches": (BASE | {"token_stream", "_request"}, {"msgspec"}),
    "prefix": (BASE | {"token_stream", "_request"}, {"anyio"}),
    "_many": (BASE | {"token_stream", "_request", "_event_loop", "_progress"}, {"anyio"}),
    "_fan_out": (BASE | {"token_stream", "_request", "_branches", "_many", "prefix"}, set()),
    "_progress": (set(), {"tqdm"}),
    "_sync_session": (BASE | {"frontend", "client", "checkpoint"}, set()),
    "llm_engine": (BASE | {"_request", "_sync_session"}, {"msgspec"}),
    "llm": (BASE | {"_request", "_sync_session", "_progress"}, set()),
    "testing": (BASE | {"checkpoint", "executor", "async_llm"}, set()),
    "__init__": (BASE | {"async_llm", "token_stream", "prefix", "llm", "llm_engine"}, set()),
    "__main__": (BASE | {"checkpoint", "kernels", "llm_engine"}, {"msgspec"}),
}

# Single modules that may import what the rest of their room may not, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("client.inproc", "core"): "InprocClient runs the engine in the caller's process",
    ("client.inproc", "executor"): "InprocClient runs the engine in the caller's process",
    ("core.engine_core", "executor"): "executor.base is the border that the core knows",
    ("core.engine_core_proc", "executor"): "executor.base is the border that the core knows",
}


@dataclass(frozen=True)
class Import:
    """One import that binds at run time."""

    module: str  # importing module, without the leading "asyncllm."
    target: str  # what it imports, dotted
    line: int
    lazy: bool  # inside a function

    @property
    def room(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"asyncllm/{self.module.replace('.', '/')}.py:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def runtime_imports(path: Path) -> Iterator[Import]:
    """Yield what ``path`` imports at run time; ``if TYPE_CHECKING`` blocks are left out."""
    module = module_name(path)

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, lazy)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:  # "from package import x": x may be a module
                is_module = base.startswith("asyncllm") and find_module(f"{base}.{alias.name}") is not None
                yield Import(module, f"{base}.{alias.name}" if is_module else base, node.lineno, lazy)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), False)


def find_module(dotted: str) -> Path | None:
    """Return the file of a module of this package."""
    base = PACKAGE.joinpath(*dotted.split(".")[1:])
    for candidate in (base.with_suffix(".py") if base != PACKAGE else base / "__init__.py", base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for path in sorted(PACKAGE.rglob("*.py")) for found in runtime_imports(path))


def internal_target(target: str) -> str | None:
    """Return the room that ``target`` lies in, ``None`` if it is not of this package."""
    if target == "asyncllm":
        return "__init__"
    return target.split(".")[1] if target.startswith("asyncllm.") else None


def test_every_room_has_a_rule() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= RULES.keys(), f"rooms without an import rule: {sorted(rooms - RULES.keys())}"


def test_rooms_import_only_rooms_below_them() -> None:
    wrong = []
    for found in all_imports():
        target = internal_target(found.target)
        allowed, _ = RULES[found.room]
        if target is None or target == found.room or target in allowed or (found.module, target) in EXCEPTIONS:
            continue
        wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_rooms_import_only_their_own_third_parties() -> None:
    wrong = []
    for found in all_imports():
        top = found.target.partition(".")[0]
        if top == "asyncllm" or top in sys.stdlib_module_names or top in RULES[found.room][1]:
            continue
        wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_lazily_and_by_models_only() -> None:
    wrong = [
        str(f) for f in all_imports() if f.target.startswith("transformers") and not (f.lazy and f.room == "models")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    edges: dict[str, set[str]] = {}
    for found in all_imports():
        path = find_module(found.target) if not found.lazy and found.target.startswith("asyncllm.") else None
        if path is not None and module_name(path) != found.module:
            edges.setdefault(found.module, set()).add(module_name(path))
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        if module in way:
            pytest.fail("import cycle: " + " -> ".join((*way[way.index(module) :], module)))
        if module in done:
            return
        for target in sorted(edges.get(module, ())):
            walk(target, (*way, module))
        done.add(module)

    for module in sorted(edges):
        walk(module, ())


def test_no_cycle_between_rooms() -> None:
    edges: dict[str, set[str]] = {}
    for found in all_imports():
        target = internal_target(found.target)
        if target is not None and target != found.room and not found.lazy and found.room != "testing":
            edges.setdefault(found.room, set()).add(target)
    rooms_by_depth: list[str] = []
    while edges:
        leaves = {room for room in edges if not edges[room] & edges.keys()}
        assert leaves, f"rooms in a cycle: { {room: sorted(edges[room] & edges.keys()) for room in edges} }"
        rooms_by_depth += sorted(leaves)
        edges = {room: targets for room, targets in edges.items() if room not in leaves}


def calls_in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def test_only_env_reads_the_environment() -> None:
    wrong = [
        f"{path}:{line} {name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "env.py"
        for line, name in calls_in(path)
        if name in ("os.environ", "os.getenv", "os.environb")
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_prints_but_the_command_line() -> None:
    wrong = [
        f"{path}:{line}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "__main__.py"
        for line, name in calls_in(path)
        if name == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_unpickled() -> None:
    """Messages are msgpack, and weights are read without running what a file says; exceptions may be caught by name."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            safely = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if name.startswith(("pickle.", "cloudpickle.", "marshal.")) or (name == "torch.load" and not safely):
                wrong.append(f"{path}:{node.lineno} {name}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------- the same, by importing it
CALLER_SIDE = ("errors", "env", "config", "outputs", "sampling_params", "wire", "checkpoint", "frontend", "client")
CALLER_FACES = ("async_llm", "token_stream", "llm", "llm_engine", "testing", "__main__")
ENGINE_SIDE = ("core", "executor", "structured")


def modules_of(room: str) -> list[str]:
    paths = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else sorted((PACKAGE / room).rglob("*.py"))
    return ["asyncllm." + module_name(path) for path in paths]


def loaded_after_importing(*names: str) -> set[str]:
    """Return the names in ``sys.modules`` of a fresh interpreter that has imported ``names``."""
    return modules_after(f"import importlib\nfor name in {list(names)!r}: importlib.import_module(name)")


def modules_after(code: str) -> set[str]:
    """Return the names in ``sys.modules`` of a fresh interpreter that has run ``code``."""
    code += "\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("rooms", [CALLER_SIDE, CALLER_FACES, ENGINE_SIDE], ids=["caller", "faces", "engine"])
def test_no_torch_where_requests_are_handled(rooms: tuple[str, ...]) -> None:
    names = [name for room in rooms for name in modules_of(room)]
    heavy = sorted(loaded_after_importing(*names) & set(HEAVY))
    assert not heavy, f"importing {rooms} loads {heavy}"


def test_using_every_public_name_loads_no_torch() -> None:
    loaded = modules_after("import asyncllm\nfor name in asyncllm.__all__: getattr(asyncllm, name)")
    assert not loaded & set(HEAVY)
