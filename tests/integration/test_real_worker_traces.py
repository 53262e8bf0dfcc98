"""What an engine with a real worker costs while it idles, what it leaves behind, and how its start fails."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncllm import LLM, AsyncLLM
from asyncllm.errors import (
    AsyncLLMError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    InsufficientMemoryError,
    ModelError,
    UnsupportedModelError,
)
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from tests.support import leaks
from tests.support.engines import Program, seconds_until_gone
from tests.support.scripted import LETTERS, letters_llm
from tests.support.timing import cpu_s

pytestmark = pytest.mark.usefixtures("no_leaks")

OPTIONS: dict[str, Any] = {"num_blocks": 64, "num_threads": 1}
on_asyncio = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])


@pytest.fixture
def runtime_dir(runtime_root: Path) -> Any:
    folder = runtime_root / "own"
    folder.mkdir()
    yield folder
    folder.rmdir()


# ------------------------------------------------------------------------------------------------- memory, descriptors
CYCLES = """
import gc, json, sys
import anyio, psutil
from asyncllm import AsyncLLM
async def main():
    me = psutil.Process()
    for _ in range(5):
        async with AsyncLLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
            await llm.generate("hello", max_tokens=20, ignore_eos=True)
            engine = psutil.Process(llm.engine_pid)
            engine_bytes = engine.memory_info().rss
        gc.collect()
        print(json.dumps([me.memory_info().rss, engine_bytes, me.num_fds(), engine.is_running()]), flush=True)
backend, _, uvloop = sys.argv[3].partition("+")
anyio.run(main, backend=backend, backend_options={"use_uvloop": True} if uvloop else {})
"""


@pytest.mark.parametrize("backend", ["asyncio", "asyncio+uvloop", "trio", "real"])
def test_r29_memory_and_descriptors_are_flat_over_five_lives_of_an_engine(
    backend: str, tmp_path: Path, tiny_llama: Path, runtime_dir: Path
) -> None:
    """In a program of its own, so that nothing else takes or gives memory. Measured: flat to 50 KiB from the second."""
    if backend == "real":
        model, options, backend = tiny_llama, OPTIONS, "asyncio"
    else:
        model, options = write_tiny_checkpoint(tmp_path), scripted_options(tokens=LETTERS)
    with Program(CYCLES, runtime_dir, str(model), json.dumps(options), backend) as program:
        out, err = program.end(60)
    assert err == ""
    own, engines, descriptors, alive = zip(*map(json.loads, out.splitlines()), strict=True)
    assert len(own) == 5
    assert own[4] - own[1] < 512 << 10, own
    assert max(engines[1:]) - min(engines[1:]) < 4 << 20, engines
    assert len(set(descriptors[1:])) == 1, descriptors
    assert not any(alive)


@pytest.mark.anyio
@on_asyncio
async def test_r30_ten_killed_engines_leave_no_file(anyio_backend: object, tmp_path: Path, runtime_root: Path) -> None:
    """Their caller lives and starts the next one; where both are killed see ``test_engine_process_death``."""
    llm = AsyncLLM(write_tiny_checkpoint(tmp_path), **scripted_options(tokens=LETTERS, step_ms=1))
    shared = set(os.listdir("/dev/shm"))
    for _ in range(10):
        await llm.start()
        stream = llm.stream("prompt", ignore_eos=True)
        await anext(stream)
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await stream.completion()
    await llm.start()
    assert (await llm.generate("prompt", max_tokens=3)).text == "abc"
    assert len(os.listdir(runtime_root)) == 1
    await llm.aclose()
    assert os.listdir(runtime_root) == []
    assert set(os.listdir("/dev/shm")) <= shared


# -------------------------------------------------------------------------------------------------------------- idling
@pytest.mark.slow
@pytest.mark.anyio
@on_asyncio
async def test_r31_an_idle_engine_takes_less_than_half_a_percent_of_a_core(
    anyio_backend: object, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes, over 10 s after a request, with what torch's threads do: the report saw 100 % for ever."""
    monkeypatch.delenv("OMP_WAIT_POLICY")  # that of these tests would hide that they spin
    async with AsyncLLM(tiny_llama, num_blocks=64) as llm:
        await llm.generate("prompt", max_tokens=20, ignore_eos=True)
        assert llm.engine_pid is not None
        await anyio.sleep(0.5)  # OpenMP threads spin for a moment after their last work
        before = cpu_s(llm.engine_pid) + cpu_s(os.getpid())
        await anyio.sleep(10)
        used = cpu_s(llm.engine_pid) + cpu_s(os.getpid()) - before
    assert used < 0.005 * 10


# ------------------------------------------------------------------------------------------------- the end of a program
LOADING = """
import sys
import anyio
from asyncllm import AsyncLLM
llm = AsyncLLM(sys.argv[1], num_blocks=64, on_progress=lambda phase, _: print(llm_pid(), phase, flush=True))
def llm_pid():
    import psutil
    return psutil.Process().children()[0].pid
anyio.run(llm.start)
print(llm.engine_pid, "started", flush=True)
anyio.run(anyio.sleep, 60)
"""


@pytest.mark.parametrize("phase", ["import_worker", "load_model", "warm_up", "started"])
def test_r19_an_engine_whose_caller_is_killed_ends_in_any_phase_of_its_start(
    phase: str, tiny_llama: Path, runtime_dir: Path
) -> None:
    """Also while it imports torch, which takes seconds of native code."""
    with Program(LOADING, runtime_dir, str(tiny_llama)) as program:
        while True:
            line = program.line()
            assert line, program.end()
            pid, seen = line.split()
            if seen == phase:
                break
        program.process.kill()
        assert seconds_until_gone(int(pid), runtime_dir) < 2.0


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_b42_dropping_an_llm_frees_its_process(used: bool, tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, **OPTIONS)
    if used:
        llm.generate("prompt", max_tokens=3)
    (pid,) = leaks.children()
    del llm
    gc.collect()
    assert seconds_until_gone(pid) < 2.0


ORDERLY = """
from asyncllm.testing import ScriptedExecutor
class Orderly(ScriptedExecutor):
    def shutdown(self):
        open(self.config.parallel.executor_options["gate_path"] + ".shut", "w").close()
        super().shutdown()
"""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left open"])
def test_b44_a_program_that_ends_normally_lets_the_executor_shut_down(
    closed: bool, tmp_path: Path, runtime_dir: Path
) -> None:
    (tmp_path / "orderly.py").write_text(ORDERLY)
    options = {"executor": "orderly.Orderly", "executor_options": {"gate_path": str(tmp_path / "gate")}}
    source = f"""
import asyncio, sys
sys.path.insert(0, {str(tmp_path)!r})
from asyncllm import AsyncLLM
async def main():
    llm = AsyncLLM({str(write_tiny_checkpoint(tmp_path / "model"))!r}, **{options!r})
    await llm.generate("prompt", max_tokens=3)
    {"await llm.aclose()" if closed else "kept.append(llm)"}
kept = []
asyncio.run(main())
"""
    with Program(source, runtime_dir) as program:
        assert program.end() == ("", "")
        assert program.process.returncode == 0
    assert leaks.wait_until((tmp_path / "gate.shut").exists, 2.0)
    assert leaks.wait_until(lambda: not any(runtime_dir.iterdir()), 2.0)


# ----------------------------------------------------------------------------------------------------- starts that fail
def damaged(model: Path, folder: Path, damage: str) -> Path:
    """Return a copy of ``model`` with something wrong."""
    shutil.copytree(model, folder)
    if damage == "cut weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "unknown architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NopeForCausalLM"]}))
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    return folder


FAILURES: list[tuple[str, dict[str, Any], type[AsyncLLMError], str]] = [
    ("cut weights", {}, CheckpointError, "model.safetensors"),
    ("unknown architecture", {}, UnsupportedModelError, "NopeForCausalLM"),
    ("no tokenizer", {}, ModelError, "tokenizer"),
    ("nothing", {"max_model_len": 512, "num_blocks": None, "kv_cache_bytes": 50_000}, InsufficientMemoryError, "fit"),
    ("nothing", {"max_model_len": 5000}, ConfigError, "512"),
    ("nothing", {"worker_cls": "no.such.Worker"}, ConfigError, "no.such.Worker"),
    ("nothing", {"attention_backend": "no_such_backend"}, ConfigError, "no_such_backend"),
]


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize(("damage", "options", "error", "text"), FAILURES, ids=[f"{f[0]} {f[1]}" for f in FAILURES])
async def test_b41_a_failed_start_keeps_type_and_remedy(
    anyio_backend: object,
    tiny_llama: Path,
    tmp_path: Path,
    damage: str,
    options: dict[str, Any],
    error: type[AsyncLLMError],
    text: str,
) -> None:
    llm = AsyncLLM(damaged(tiny_llama, tmp_path / "model", damage), **{**OPTIONS, **options})
    with pytest.raises(error, match=text) as caught:
        await llm.start()
    if isinstance(caught.value, InsufficientMemoryError):
        fit = caught.value.max_model_len_fit
        async with AsyncLLM(tiny_llama, **{**OPTIONS, **options, "max_model_len": fit}) as fitting:
            assert fitting.info.max_model_len == fit


FAILING_WORKER = """
from asyncllm.worker.worker import Worker
class Failing(Worker):
    def PHASE(self, *args):
        raise ZeroDivisionError("broken on purpose")
"""


@pytest.mark.anyio
@on_asyncio
@pytest.mark.parametrize("phase", ["load_model", "determine_num_blocks", "warm_up"])
async def test_b41_an_exception_in_a_phase_of_the_worker_ends_the_start(
    anyio_backend: object, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    (tmp_path / f"failing_{phase}.py").write_text(FAILING_WORKER.replace("PHASE", phase))
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = AsyncLLM(tiny_llama, worker_cls=f"failing_{phase}.Failing", **OPTIONS)
    with pytest.raises(EngineStartError, match="ZeroDivisionError: broken on purpose") as caught:
        await llm.start()
    assert caught.value.phase == phase
    assert not llm.healthy


def test_b38_a_device_that_is_not_there_is_the_engines_finding(tiny_llama: Path, runtime_dir: Path) -> None:
    """The front end makes no device context and needs no torch to be told."""
    source = """
import asyncio, sys
from asyncllm import AsyncLLM
from asyncllm.errors import ConfigError
llm = AsyncLLM(sys.argv[1], device="cuda")
try:
    asyncio.run(llm.start())
except ConfigError as error:
    print(error.parameter, error.value, "torch" in sys.modules)
"""
    with Program(source, runtime_dir, str(tiny_llama)) as program:
        assert program.end() == ("device cuda False\n", "")


@pytest.mark.anyio
async def test_b40_an_exception_in_a_step_ends_every_stream_with_its_cause() -> None:
    async with letters_llm({"fail_at_step": 5}) as llm:
        pid = llm.engine_pid
        assert pid is not None
        causes: list[str] = []

        async def read(number: int) -> None:
            with pytest.raises(EngineDeadError) as caught:
                await llm.generate(f"prompt {number}", ignore_eos=True)
            causes.append(str(caught.value.__cause__))

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(read, number)
        assert len(causes) == 8
        assert all("scripted failure at step 5" in cause for cause in causes)
        assert llm.errored
        with pytest.raises(EngineDeadError):
            await llm.generate("prompt")
        assert not leaks.process_lives(pid)
