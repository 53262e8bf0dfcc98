"""Which platform an engine gets, on machines with and without a GPU that can serve."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from asyncllm import platforms
from asyncllm.config import DeviceConfig, EngineConfig
from asyncllm.errors import ConfigError
from asyncllm.platforms import cuda
from asyncllm.platforms.cuda import GPU, CudaPlatform, CudaProbe

V100, H200 = GPU("V100", (7, 0)), GPU("H200", (9, 0))
NO_CUDA = CudaProbe(cuda_version=None)
NO_DRIVER = CudaProbe(cuda_version="13.0", complaint="the NVIDIA driver is too old")


def on(machine: CudaProbe, monkeypatch: pytest.MonkeyPatch, **options: object) -> platforms.Platform:
    monkeypatch.setattr(cuda, "probe", lambda: machine)
    return platforms.current(EngineConfig.from_options("model", **options))


@pytest.mark.parametrize(
    ("machine", "device", "reason"),
    [
        (NO_CUDA, "cpu", "torch was built without CUDA"),
        (NO_DRIVER, "cpu", "torch finds no GPU (the NVIDIA driver is too old)"),
        (CudaProbe(cuda_version="13.0", gpus=(V100,)), "cpu", "V100 has the compute capability 7.0"),
        (CudaProbe(cuda_version="13.0", gpus=(H200, H200)), "cuda:0", "H200"),
        (CudaProbe(cuda_version="13.0", gpus=(V100, H200)), "cuda:1", "H200"),
    ],
)
def test_auto_takes_the_first_gpu_that_can_serve_else_the_cpu(
    machine: CudaProbe, device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = on(machine, monkeypatch)
    assert platform.device == device
    assert platform.reason.startswith(reason)
    assert platform.worker_cls == "asyncllm.worker.worker.Worker"


def test_auto_takes_the_cpu_for_a_backend_that_only_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = CudaProbe(cuda_version="13.0", gpus=(H200,))
    assert on(machine, monkeypatch, attention_backend="native").device == "cpu"
    assert on(machine, monkeypatch, attention_backend="triton").device == "cuda:0"


def test_the_cpu_is_taken_without_asking_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "probe", None)
    assert platforms.current(EngineConfig.from_options("model", device="cpu")).device == "cpu"


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_is_taken_by_its_index(device: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = CudaProbe(cuda_version="13.0", gpus=(H200, H200))
    assert on(machine, monkeypatch, device=device).device == f"cuda:{index}"


@pytest.mark.parametrize(
    ("machine", "device", "words"),
    [
        (NO_CUDA, "cuda", "device is 'cuda', but torch was built without CUDA; install a CUDA build of torch"),
        (NO_DRIVER, "cuda", "the NVIDIA driver is too old.*install the NVIDIA driver.*CUDA_VISIBLE_DEVICES"),
        (CudaProbe(cuda_version="13.0", gpus=(H200,)), "cuda:1", "sees 1 GPUs; it must be at most 'cuda:0'"),
        (CudaProbe(cuda_version="13.0", gpus=(H200, V100)), "cuda:1", r"capability 7\.0; 8\.0 \(Ampere\) or newer"),
        (CudaProbe(cuda_version="13.0", gpus=(H200,)), "tpu", "device is 'tpu', which is not known"),
        (CudaProbe(cuda_version="13.0", gpus=(H200,)), "cuda:x", "device is 'cuda:x', which is not known"),
    ],
)
def test_a_device_that_cannot_serve_is_refused_with_the_remedy(
    machine: CudaProbe, device: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        on(machine, monkeypatch, device=device)
    assert (caught.value.parameter, caught.value.value) == ("device", device)
    assert caught.value.limit


def test_what_torch_says_of_its_gpus_and_warns_of_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        import warnings

        warnings.warn("an old\n  driver", stacklevel=1)
        return True

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    found = cuda.probe()
    assert found == CudaProbe(cuda_version="13.0", gpus=(GPU("GPU 0", (9, 0)),), complaint="an old driver")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cuda.probe() == NO_CUDA


def test_the_dtype_is_that_of_the_checkpoint_if_it_has_sixteen_bits() -> None:
    platform = CudaPlatform(0)
    assert [platform.default_dtype(stored) for stored in ("float16", "bfloat16")] == ["float16", "bfloat16"]
    assert {platform.default_dtype(stored) for stored in ("float32", None, "int8")} == {"bfloat16"}


def test_one_thread_unless_asked() -> None:
    assert CudaPlatform(0).num_threads(DeviceConfig()) == 1
    assert CudaPlatform(0).num_threads(DeviceConfig(num_threads=3)) == 3


def test_importing_the_platforms_imports_no_torch() -> None:
    code = "import sys, asyncllm.platforms; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
