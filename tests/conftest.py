"""Fixtures that every test may use: event loops, models, and the check that nothing is left behind.

Models are made or converted once per session. Engines started by tests put their sockets under one private folder,
which has to be empty, with no child process alive, when the session ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.support import gemma3, leaks, models

# Before torch is imported, here or by an engine. Threads of OpenMP spin while they wait for each other: on cores that
# others use too, a step of two threads takes ten times as long as one of a single thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Before triton is imported: its kernels run on CPU tensors. What is compiled is, in a process without this.
os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background lets them, and every program that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_GGUF = REPOSITORY / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_GEMMA3 = REPOSITORY / ".models" / "gemma3-270m.Q4_K_M.gguf"

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(scope="module", params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Run each async test on asyncio, uvloop and trio."""
    return request.param


# ------------------------------------------------------------------------------------------------------------ models
def find_gguf() -> Path | None:
    path = Path(os.environ.get("ASYNCLLM_TEST_MODEL") or DEFAULT_GGUF)
    return path if path.is_file() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_gguf() is None:
        absent = pytest.mark.skip(
            reason=f"no SmolLM2 GGUF at ASYNCLLM_TEST_MODEL or {DEFAULT_GGUF}; `make model` brings it"
        )
        for item in items:
            if item.get_closest_marker("model"):
                item.add_marker(absent)
    if importlib.util.find_spec("triton") is None:
        not_installed = pytest.mark.skip(reason="triton is not installed; the extra gpu-test brings it")
        for item in items:
            if item.get_closest_marker("triton"):
                item.add_marker(not_installed)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct as a Q4_1 GGUF; mark tests that use it ``model``."""
    path = find_gguf()
    if path is None:
        pytest.skip("no SmolLM2 GGUF; mark this test with pytest.mark.model")
    return path


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same weights as a Hugging Face folder in float32, written once per session and removed at its end."""
    folder = tmp_path_factory.mktemp("smollm2")
    models.convert_gguf(smollm2_gguf, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """The real Gemma 3 270M as a Q4_K_M GGUF; a test that uses it is skipped where there is none."""
    path = Path(os.environ.get("ASYNCLLM_TEST_GEMMA3") or DEFAULT_GEMMA3)
    if not path.is_file():
        pytest.skip(f"no Gemma 3 GGUF at ASYNCLLM_TEST_GEMMA3 or {DEFAULT_GEMMA3}; `make gemma3` brings it")
    return path


@pytest.fixture(scope="session")
def gemma3_folder(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its weights rounded to bfloat16 as a Hugging Face folder, written once per session and removed at its end."""
    folder = tmp_path_factory.mktemp("gemma3")
    gemma3.convert(gemma3_gguf, folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with grouped key/value heads and a byte-level tokenizer."""
    return models.write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer OPT in the shape of opt-125m (pre-norm) with a byte-level tokenizer."""
    return models.write_tiny_opt(tmp_path_factory.mktemp("tiny-opt"))


# ------------------------------------------------------------------------------------------------------------- traces
@pytest.fixture(scope="session", autouse=True)
def runtime_root() -> Iterator[Path]:
    """Where engines of this session put their sockets; nothing may be left there, and no child alive, at the end."""
    with contextlib.suppress(ImportError):  # its first loop opens two descriptors that stay
        anyio.run(anyio.sleep, 0, backend="asyncio", backend_options={"use_uvloop": True})
    root = Path(tempfile.mkdtemp(prefix="al-", dir="/tmp"))  # socket paths are limited to about 100 bytes
    before = os.environ.get("ASYNCLLM_RUNTIME_DIR")
    os.environ["ASYNCLLM_RUNTIME_DIR"] = str(root)
    try:
        yield root
        leaks.wait_until(lambda: not leaks.children() and not any(root.iterdir()), timeout_s=10.0)
        alive = leaks.children()
        left = sorted(str(path) for path in root.rglob("*"))
        assert not alive, f"processes left behind: {[leaks.describe(pid) for pid in alive]}"
        assert not left, f"files left behind: {left}"
    finally:
        if before is None:
            del os.environ["ASYNCLLM_RUNTIME_DIR"]
        else:
            os.environ["ASYNCLLM_RUNTIME_DIR"] = before
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def no_leaks(runtime_root: Path) -> Iterator[None]:
    """Fail the test if it leaves a child process, thread, file descriptor or runtime file behind."""
    with leaks.no_leaks(runtime_root):
        yield
