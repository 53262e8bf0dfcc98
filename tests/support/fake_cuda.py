"""Whole steps of the runner on a GPU that is not there: device "cuda", tensors with shapes, dtypes and no numbers.

Run as a program (it registers a device for the whole process): ``python -m tests.support.fake_cuda LIBRARY FOLDER``
runs the model in FOLDER through prefill, mixed and decode steps, with graphs and without, and prints one line of JSON
per scenario. What a GPU would have to wait for raises there: reading a number, ``if tensor``, a boolean mask, mixing
tensors of host and device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from asyncllm.attention.base import AttentionSpec
from asyncllm.attention.selector import choose_backend
from asyncllm.checkpoint import open_checkpoint
from asyncllm.models import registry
from asyncllm.wire.messages import EngineSampling, RareSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.cuda_graphs import graph_sizes
from asyncllm.worker.device_runtime import DONE, DeviceRuntime, Download, Event, Graph, Staging
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.step_result import StepResult
from tests.support import flash_attn_contract

T = TypeVar("T")

SOURCE = Path(__file__).with_name("noop_cuda_guard.cpp")
CUDA = torch.device("cuda:0")


def compile_guard(folder: Path) -> Path | None:
    """Return the compiled device guard, ``None`` where there is no C++ compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        return None
    root = Path(torch.__file__).parent
    output = folder / "noop_cuda_guard.so"
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", "-w", *includes]
    libraries = [f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(output), *libraries], check=True)
    return output


class FakeCudaRuntime(DeviceRuntime):
    """Staging blocks are real memory, everything else is a fake tensor on the device."""

    shares_memory = False
    num_stages = 2
    can_capture = True

    def __init__(self) -> None:
        super().__init__(CUDA)
        self.num_copies = self.num_uploads = self.num_replays = 0

    def staging(self, num_bytes: int) -> Staging:
        with unset_fake_temporarily():
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            return Staging(memory, memory.numpy())

    def device_block(self, staging: Staging) -> torch.Tensor:
        return torch.empty(staging.tensor.shape, dtype=torch.uint8, device=CUDA)

    def copy(self, staging: Staging, block: torch.Tensor) -> Event:
        self.num_copies += 1
        return DONE

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        self.num_uploads += 1
        with unset_fake_temporarily():
            dtype = torch.from_numpy(array).dtype
        return torch.empty(array.shape, dtype=dtype, device=CUDA)

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        assert all(tensor.device == CUDA for tensor in tensors)
        with unset_fake_temporarily():
            zeros = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

        class Zeros:
            def wait(self) -> list[torch.Tensor]:
                return zeros

        return Zeros()

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        output = work()
        runtime = self

        class Counted:
            def replay(self) -> None:
                runtime.num_replays += 1

        return Counted(), output

    def drop_graphs(self) -> None: ...

    def synchronize(self) -> None: ...

    def memory_info(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def allocated_bytes(self) -> int:
        return 0

    def peak_allocated_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...


@contextmanager
def fake_cuda(library: Path) -> Iterator[None]:
    """Make new tensors fake ones, also on a device "cuda"."""
    torch.ops.load_library(library)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield


def make_runner(folder: Path, dtype: torch.dtype, backend: str, *, with_graphs: bool) -> ModelRunner:
    """Return a runner of the model in ``folder``; its weights have no numbers. ``backend``: may have a version."""
    name, _, version = backend.partition(" ")
    block_size = 256 if version == "2" else 16
    checkpoint = open_checkpoint(str(folder))
    with unset_fake_temporarily():  # a file cannot be mapped to fake tensors
        weights = list(registry.iter_weights(checkpoint, None))
    with mock.patch.object(registry, "iter_weights", return_value=iter(weights)):
        model = registry.build_model(checkpoint, dtype, CUDA)
    spec = AttentionSpec(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=CUDA,
    )
    with flash_attn_contract.installed(*version):
        chosen = choose_backend(name, spec, ())
        return ModelRunner(
            model,
            chosen,
            chosen.allocate(65),
            FakeCudaRuntime(),
            max_num_seqs=20,
            max_num_batched_tokens=128,
            max_model_len=25 * block_size,
            vocab_size=model.vocab_size,
            eos_token_ids=(2,),
            graph_sizes=graph_sizes(20) if with_graphs else [],
        )


def request(slot: int, num_tokens: int, **sampling: Any) -> NewRequest:
    block_ids = list(range(1 + 3 * slot, 4 + 3 * slot))
    return NewRequest(slot, slot, [5] * num_tokens, num_tokens, 0, block_ids, EngineSampling(max_tokens=99, **sampling))


PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}] * 3
RANDOM: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.1},
]
ADJUSTED: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 4, "prompt_logprobs": 2},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 3, "stop_token_ids": [7]},
    {
        "temperature": 1.0,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": [3, 4, 5],
        "logprobs": 0,
        "rare": RareSampling(bad_words=[[3, 4], [5]], logprob_token_ids=[1, 2]),
    },
]
KIND_TO_SAMPLING = {"greedy": PLAIN, "random": RANDOM, "adjusted": ADJUSTED}


def run_steps(runner: ModelRunner, samplings: list[dict[str, Any]]) -> None:
    """Prefill whole and in chunks, mix with decode rows, decode with growing block tables; read every result."""
    results: list[StepResult] = []

    def step(step_id: int, slots: list[int], counts: list[int], **changes: Any) -> None:
        results.append(runner.execute(SchedulerOutput(step_id, slots, counts, sum(counts), **changes)))

    news = [request(slot, 30, **sampling) for slot, sampling in enumerate(samplings)]
    step(0, [0, 1], [30, 20], new_requests=news[:2])
    step(1, [0, 1, 2], [1, 10, 30], new_requests=news[2:])
    for nth in range(2, 6):
        step(nth, [0, 1, 2], [1, 1, 1], block_slots=[1], block_ids=[[60 + nth - 2]])
    step(6, [2, 0], [1, 1], freed_slots=[1])
    for result in results:  # all were launched before one was read
        with unset_fake_temporarily():
            assert len(result.result().token_ids) in (2, 3)


def main(library: Path, folders: Sequence[Path], backends: Sequence[str]) -> None:
    with fake_cuda(library):
        for folder in folders:
            for backend in backends:
                for with_graphs in (False, True):
                    runner = make_runner(folder, torch.bfloat16, backend, with_graphs=with_graphs)
                    if with_graphs:
                        runner.capture_graphs()
                    runtime = runner.runtime
                    assert isinstance(runtime, FakeCudaRuntime)
                    for kind, samplings in KIND_TO_SAMPLING.items():
                        before = runtime.num_copies, runtime.num_replays
                        run_steps(runner, samplings)
                        runner.batch.apply(SchedulerOutput(9, [], [], 0, freed_slots=[0, 2]))
                        found = {
                            "model": folder.name,
                            "backend": backend,
                            "graphs": with_graphs,
                            "kind": kind,
                            "copies": runtime.num_copies - before[0],
                            "replays": runtime.num_replays - before[1],
                        }
                        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[3:]], sys.argv[2].split(","))
