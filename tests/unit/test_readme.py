"""The README's tables say what the code says."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import msgspec

from asyncllm import Usage, config
from asyncllm.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(marker: str) -> dict[str, str]:
    """Return first column -> second column of the table behind ``<!-- marker: ...``."""
    _, _, rest = README.partition(f"<!-- {marker}:")
    lines = rest.split("\n\n")[0].splitlines()
    rows = [re.findall(r"[^|]+", line) for line in lines if line.startswith("| `")]
    return {row[0].strip(" `"): row[1].strip(" `") for row in rows}


def shown(default: object) -> str:
    """Return a default as the README writes it."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def test_the_options_table_is_that_of_the_configuration() -> None:
    sections = [getattr(config, name) for name in config.__all__ if name != "EngineConfig"]
    expected = {}
    for section in dataclasses.fields(config.EngineConfig):  # in the order in which they are composed
        kind = next(cls for cls in sections if cls.__name__ == section.type)
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING:
                expected[field.name] = shown(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                expected[field.name] = shown(field.default_factory())
            else:
                expected[field.name] = "(required)"
    assert list(table("options").items()) == list(expected.items())


def test_the_sampling_table_is_that_of_the_parameters() -> None:
    expected = {field.name: shown(field.default) for field in msgspec.structs.fields(SamplingParams)}
    assert list(table("sampling").items()) == list(expected.items())


def test_the_usage_table_names_every_field() -> None:
    assert tuple(table("usage")) == Usage.__struct_fields__


def test_the_map_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "asyncllm").glob("*/__init__.py")}
    _, _, rest = README.partition("## The rooms")
    named = set(re.findall(r"`(\w+)/`", rest.split("\n## ")[0]))
    assert named - {"tests", "examples", "benchmarks"} == rooms


def test_every_example_and_link_exists() -> None:
    linked = set(re.findall(r"\]\((?!http)([^)]+)\)", README))
    assert [target for target in sorted(linked) if not (ROOT / target).exists()] == []
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= linked


def test_python_blocks_compile() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
