"""Programs in odd surroundings: few descriptors, no current folder, bad variables, a fork; typed errors, no noise."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from asyncllm.testing import write_tiny_checkpoint
from tests.support.engines import Program

SCRIPT = """
import asyncio, os, resource, sys
from asyncllm import LLM, AsyncLLM
from asyncllm.errors import AsyncLLMError
from asyncllm.testing import scripted_options

MODEL, OPTIONS = sys.argv[1], scripted_options({"hi": "hello"})

async def ask(llm):
    return (await llm.generate("hi")).text

async def main():
    async with AsyncLLM(MODEL, **OPTIONS) as llm:
        return await ask(llm)

def run():
    print(asyncio.run(main()))
"""


@pytest.fixture
def runtime_dir(runtime_root: Path, request: pytest.FixtureRequest) -> Path:
    folder = runtime_root / f"h{zlib.crc32(request.node.name.encode()):x}"
    folder.mkdir()
    return folder


def run(tail: str, model: Path, runtime_dir: Path, **options: object) -> tuple[str, str]:
    """Run the script with ``tail``; nothing may be left of its engines."""
    with Program(SCRIPT + tail, runtime_dir, str(model), **options) as program:
        output = program.end()
    left = sorted(runtime_dir.rglob("*"))
    runtime_dir.rmdir()
    assert not left
    return output


def test_a_failed_start_is_told_once(tmp_path: Path, runtime_dir: Path) -> None:
    """Dropping the object after its event loop has ended must not raise in ``__del__``."""
    _, stderr = run("OPTIONS['executor'] = 'no.such.Executor'\nrun()", write_tiny_checkpoint(tmp_path), runtime_dir)
    assert "ConfigError" in stderr
    assert "ignored" not in stderr


@pytest.mark.parametrize("limit", [10, 13, 16, 19, 22])
def test_too_few_descriptors_are_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, runtime_dir: Path, limit: int
) -> None:
    """libzmq aborts the process that it finds no descriptor in."""
    tail = f"""
async def main():
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + {limit}, used + {limit}))
    try:
        async with AsyncLLM(MODEL, **OPTIONS) as llm:
            return await ask(llm)
    except AsyncLLMError as error:
        return f"{{type(error).__name__}}: {{error}}"
run()
"""
    stdout, stderr = run(tail, write_tiny_checkpoint(tmp_path), runtime_dir)
    assert stdout.strip() == "hello" or ("EngineStartError" in stdout and "Too many open files" in stdout), stderr
    assert not stderr


def test_a_current_folder_that_is_gone(tmp_path: Path, runtime_dir: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    tail = "import shutil; shutil.rmtree(os.getcwd())\nrun()"  # and sys.path[0] is ''
    assert run(tail, write_tiny_checkpoint(tmp_path), runtime_dir, cwd=folder) == ("hello\n", "")


def test_a_variable_that_is_no_number(tmp_path: Path, runtime_dir: Path) -> None:
    tail = "os.environ['ASYNCLLM_STARTUP_TIMEOUT_S'] = 'soon'\nrun()"
    _, stderr = run(tail, write_tiny_checkpoint(tmp_path), runtime_dir)
    assert "ConfigError: ASYNCLLM_STARTUP_TIMEOUT_S must be a positive number of seconds" in stderr


FORK = """
def in_child(use):
    pid = os.fork()
    if pid == 0:
        try:
            use()
        except AsyncLLMError as error:
            print(type(error).__name__, "fork" in str(error), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_fork_that_uses_the_engine_of_its_parent_is_told_so(tmp_path: Path, runtime_dir: Path) -> None:
    """It has the sockets but not the threads behind them: it would wait for ever."""
    tail = """
llm = AsyncLLM(MODEL, **OPTIONS)
print(asyncio.run(ask(llm)), flush=True)
in_child(lambda: asyncio.run(ask(llm)))
in_child(lambda: asyncio.run(llm.stats()))
in_child(lambda: asyncio.run(llm.aclose()))
print(asyncio.run(ask(llm)))
asyncio.run(llm.aclose())
"""
    stdout, stderr = run(FORK + tail, write_tiny_checkpoint(tmp_path), runtime_dir)
    assert (stdout, stderr) == ("hello\nUsageError True\nUsageError True\nhello\n", "")


def test_a_fork_that_uses_the_synchronous_face_is_told_so(tmp_path: Path, runtime_dir: Path) -> None:
    tail = """
with LLM(MODEL, **OPTIONS) as llm:
    in_child(lambda: llm.generate("hi"))
    in_child(lambda: llm.stats())
    in_child(lambda: llm.close())
    print(llm.generate("hi")[0].text)
"""
    stdout, stderr = run(FORK + tail, write_tiny_checkpoint(tmp_path), runtime_dir)
    assert (stdout, stderr) == ("UsageError True\nUsageError True\nhello\n", "")
