"""Which fused kernels a model gets, and that its logits are the same with either kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.attention.base import FlatBatch
from asyncllm.attention.reference import ReferenceAttention
from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import ConfigError
from asyncllm.kernels.fused import HeadNorms, Rotation, fused_kernels
from asyncllm.models.registry import build_model
from tests.support.flat import FlatDriver
from tests.support.models import write_tiny_gemma3, write_tiny_llama

CPU = torch.device("cpu")
VARIABLE = "ASYNCLLM_FUSED_KERNELS"


class PagedReference(ReferenceAttention):
    """The oracle over caches [2, N, S, KV, D], which the fused kernels write."""

    def allocate(self, num_blocks: int) -> list[Any]:
        spec = self.spec
        shape = (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return [torch.zeros(shape, dtype=spec.dtype) for _ in range(spec.num_layers)]

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, cache: Any, plan: FlatBatch, norms: HeadNorms | None = None
    ) -> torch.Tensor:
        slots = torch.from_numpy(plan.slot_mapping)
        return fused_kernels(self.spec.device).rotate_and_write(heads, rotation, cache, slots, norms)

    def forward(self, query: torch.Tensor, cache: Any, plan: FlatBatch, **options: Any) -> torch.Tensor:
        keys, values = cache.flatten(1, 2)
        return super().forward(query, (keys, values), plan, **options)


@pytest.mark.triton
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_gemma3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_gives_the_same_with_either_kind(
    write: Callable[[Path], Path], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, logits = write(tmp_path), dict[str, torch.Tensor]()
    for kind in ("torch", "triton"):
        monkeypatch.setenv(VARIABLE, kind)
        driver = FlatDriver(build_model(open_checkpoint(str(folder)), dtype, CPU), backend_class=PagedReference)
        steps = [driver.step({0: list(range(9))})[0], driver.step({0: [7], 1: [3, 5]})[1]]
        logits[kind] = torch.cat(steps)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # logits of about 1, after a few neighbours in bfloat16
    torch.testing.assert_close(logits["triton"], logits["torch"], rtol=0, atol=tolerance)


def test_a_paged_cache_in_torch_gives_what_the_backend_does(tmp_path: Path) -> None:
    model = build_model(open_checkpoint(str(write_tiny_llama(tmp_path))), torch.float32, CPU)
    tokens = list(range(9))
    expected = FlatDriver(model).step({0: tokens})[0]
    assert torch.equal(FlatDriver(model, backend_class=PagedReference).step({0: tokens})[0], expected)


def test_a_cpu_computes_in_torch_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert fused_kernels(CPU).name == "torch"


@pytest.mark.triton
def test_a_gpu_computes_in_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert fused_kernels(torch.device("cuda")).name == "triton"
    monkeypatch.setenv(VARIABLE, "torch")
    assert fused_kernels(torch.device("cuda")).name == "torch"


def test_without_triton_a_gpu_computes_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert fused_kernels(torch.device("cuda")).name == "torch"
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ConfigError, match="not installed"):
        fused_kernels(CPU)


def test_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="'fast'; it must be torch or triton"):
        fused_kernels(CPU)


@pytest.mark.triton
def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr("asyncllm.kernels.triton.fused.INTERPRETED", False)
    with pytest.raises(ConfigError, match="in its interpreter only"):
        fused_kernels(CPU)
