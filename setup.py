"""The part of the installation that ``pyproject.toml`` cannot say: compile the native CPU kernels into the wheel.

Without a C++ compiler, or if it fails, the package installs without them and runs on torch, with a warning here and in
``python -m asyncllm info``. ``ASYNCLLM_KERNELS=off`` skips the compilation. An editable installation compiles nothing:
``python -m asyncllm.kernels.build`` does it in the source tree.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


def load_build_module() -> Any:
    """Import ``asyncllm/kernels/build.py`` alone: the package's requirements are not there yet."""
    spec = importlib.util.spec_from_file_location("asyncllm_kernels_build", HERE / "asyncllm/kernels/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Copies the package, then compiles the kernels beside it."""

    def run(self) -> None:
        """Build; a missing or failing compiler is a warning."""
        super().run()
        target = Path(self.build_lib) / "asyncllm" / "kernels" / "lib"
        shutil.rmtree(target, ignore_errors=True)  # libraries of a developer's tree are for that machine
        if self.editable_mode or os.environ.get("ASYNCLLM_KERNELS") == "off":
            return
        kernels = load_build_module()
        try:
            compiler = kernels.find_compiler(os.environ.get("CXX"))
            paths = kernels.build(target, compiler=compiler)
        except (kernels.BuildError, OSError) as error:
            self.warn(f"the native CPU kernels were not compiled; asyncllm will run several times slower.\n{error}")
            return
        self.announce(f"compiled {', '.join(path.name for path in paths)}", 2)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python of this platform: the libraries are called through ctypes, not through Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return ``py3-none-PLATFORM``."""
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    """Says that what is built belongs to one platform."""

    def has_ext_modules(self) -> bool:
        """Return whether there is compiled code."""
        return os.environ.get("ASYNCLLM_KERNELS") != "off"


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
