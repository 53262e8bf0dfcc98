"""The public surface: names that exist, are documented and cost little to import."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import asyncllm

PACKAGE = Path(asyncllm.__file__).parent
PUBLIC_MODULES = ("config", "env", "errors", "outputs", "sampling_params", "testing")

MAX_IMPORT_TIME_S = 0.35
MAX_IMPORT_RSS_MIB = 40.0

MEASURE = """
import time
begun = time.perf_counter()
{code}
took = time.perf_counter() - begun
with open("/proc/self/status") as status:  # not ru_maxrss: a child starts with its parent's
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(took, peak_kib / 1024)
"""


def test_every_name_in_all_exists() -> None:
    for name in asyncllm.__all__:
        assert getattr(asyncllm, name) is not None
    assert len(set(asyncllm.__all__)) == len(asyncllm.__all__)
    assert set(asyncllm.__all__) <= set(dir(asyncllm))


def test_the_names_of_the_public_api() -> None:
    assert set(asyncllm.__all__) >= {
        "AsyncLLM", "LLM", "LLMEngine", "TokenStream", "EngineConfig", "SamplingParams", "run",
        "Completion", "FinishReason", "Logprob", "TokenDelta", "TokenLogprobs", "Usage",
    }  # fmt: skip
    from asyncllm import errors

    assert set(asyncllm.__all__) >= set(errors.__all__) - {"ErrorInfo", "describe_error", "shown"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = asyncllm.no_such_name


def test_the_errors_module_needs_no_import_of_its_own() -> None:
    code = "import asyncllm, sys; assert 'asyncllm.errors' not in sys.modules; print(asyncllm.errors.RequestError)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert "asyncllm.errors.RequestError" in done.stdout, done.stderr
    assert "errors" in dir(asyncllm)


def test_every_public_name_has_a_docstring() -> None:
    for name in asyncllm.__all__:
        value = getattr(asyncllm, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
            assert value.__module__.startswith("asyncllm"), name


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_all_lists_exactly_the_public_names_of_a_module(module_name: str) -> None:
    module = importlib.import_module(f"asyncllm.{module_name}")
    for name in module.__all__:
        assert hasattr(module, name), name
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    assert defined <= set(module.__all__), (
        f"public by name, but not in __all__: {sorted(defined - set(module.__all__))}"
    )


def test_every_module_says_what_lives_there() -> None:
    silent = [str(path) for path in PACKAGE.rglob("*.py") if not path.read_text(encoding="utf-8").startswith('"""')]
    assert not silent, f"modules without a docstring: {silent}"


def measure(code: str, repeats: int) -> tuple[float, float]:
    """Return the least time in seconds and the least peak memory in MiB of fresh interpreters that run ``code``."""
    rows = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE.format(code=code)],
            capture_output=True,
            text=True,
            check=True,
            cwd=PACKAGE.parent,
        )
        rows.append(tuple(map(float, done.stdout.split())))
    times, peaks = zip(*rows, strict=True)
    return min(times), min(peaks)


def test_import_costs_little_time_and_memory() -> None:
    took_s, peak_mib = measure("import asyncllm", 5)
    assert took_s < MAX_IMPORT_TIME_S
    assert peak_mib < MAX_IMPORT_RSS_MIB


def test_even_with_every_public_name_memory_stays_low() -> None:
    _, peak_mib = measure("import asyncllm\nfor name in asyncllm.__all__: getattr(asyncllm, name)", 2)
    assert peak_mib < MAX_IMPORT_RSS_MIB
