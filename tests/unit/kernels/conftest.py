"""Fixtures of the kernel tests: every compiled library that runs here, on one and on two threads.

A machine with a compiler but without compiled libraries gets them once per session, in a folder of its own.
``ASYNCLLM_TEST_KERNELS`` names another folder to take what there is from, such as one built with sanitizers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncllm.kernels import build, library
from asyncllm.kernels.native import NativeKernels
from asyncllm.kernels.reference import TorchKernels

ISAS = build.isas()


@pytest.fixture(autouse=True, scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the compiled libraries, in place of the package's own where that is empty."""
    given = os.environ.get("ASYNCLLM_TEST_KERNELS")
    folder = Path(given) if given else build.LIBRARY_DIR
    if not given and not all(build.library_path(isa, folder).is_file() for isa in ISAS):
        if build.find_compiler() is None:
            pytest.skip("no compiled kernels, and no C++ compiler to make them")
        folder = tmp_path_factory.mktemp("kernels")
        build.build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library_dir", lambda: folder)
        yield folder


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that was compiled and that this machine runs."""
    if request.param not in library.usable():
        pytest.skip(f"this machine does not run {request.param}")
    return request.param


@pytest.fixture
def kernels(isa: str) -> NativeKernels:
    """The native kernels on two threads."""
    return NativeKernels(2, isa)


@pytest.fixture
def alone(isa: str) -> NativeKernels:
    """The same on one thread."""
    return NativeKernels(1, isa)


@pytest.fixture
def reference() -> TorchKernels:
    return TorchKernels()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
