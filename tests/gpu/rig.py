"""What the phases of ``prove.py`` share: the device or its stand-in, models with random weights, timing, comparing.

Rehearsed, everything runs on the CPU: Triton kernels in the interpreter, graphs by the emulation that the tests use,
and shapes small enough for that. Nothing here decides what is measured.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, AttentionSpec, DeviceBatch, StepField, StepLimits
from asyncllm.attention.selector import choose_backend
from asyncllm.checkpoint import open_checkpoint
from asyncllm.layers.linear import prepare_linear_layers
from asyncllm.layers.linear_onednn import default_linear_method
from asyncllm.models import registry
from asyncllm.models.base import CausalLM
from asyncllm.testing import EOS, write_tiny_checkpoint
from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.device_runtime import DeviceRuntime, make_runtime
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.step_buffers import StepBuffers
from tests.support.attention import PagedRows, make_batch

__all__ = ["DeviceRows", "LlamaShape", "Rig", "Timed", "decode_steps", "timed"]


@dataclass(frozen=True)
class LlamaShape:
    """A Llama by its sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def config(self, max_position: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": max_position,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": EOS,
            "eos_token_id": EOS,
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers' matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a decode step reads in bfloat16: all matrices and the head, not the embeddings."""
        return 2 * (self.layer_parameters + self.vocab * self.hidden)


LLAMA_1B = LlamaShape("1B", 2048, 8192, 16, 32, 8, 64, 128256, tied=True)
LLAMA_8B = LlamaShape("8B", 4096, 14336, 32, 32, 8, 128, 128256, tied=False)
TOY = LlamaShape("toy", 32, 64, 2, 4, 2, 16, 300, tied=True)


@dataclass(frozen=True)
class Rig:
    """The device of this run. ``rehearse``: a CPU plays it."""

    rehearse: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.rehearse else torch.device("cuda:0")

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options that put an engine on this device."""
        if self.rehearse:
            return {"device": "cpu", "attention_backend": "triton", "num_blocks": 64}
        return {"device": "cuda"}

    def shape(self, shape: LlamaShape) -> LlamaShape:
        """Return ``shape``, or one that the interpreter can run."""
        return replace(TOY, name=f"{shape.name} (rehearsed)") if self.rehearse else shape

    def pick(self, real: Any, rehearsed: Any) -> Any:
        return rehearsed if self.rehearse else real

    def runtime(self) -> DeviceRuntime:
        if self.rehearse:
            from tests.support.emulated_device import EmulatedRuntime

            return EmulatedRuntime()
        return make_runtime(self.device)

    def make_model(self, shape: LlamaShape, *, max_position: int, dtype: torch.dtype) -> CausalLM:
        """Return a model with random weights, made on the device."""
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_checkpoint(folder)
            Path(folder, "config.json").write_text(json.dumps(shape.config(max_position)))
            checkpoint = open_checkpoint(folder)
            method = default_linear_method(dtype, self.device)
            model = registry.find_class(checkpoint)(checkpoint, dtype=dtype, device=self.device, linear_method=method)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        prepare_linear_layers(model)
        return model.eval()

    def make_runner(
        self,
        model: CausalLM,
        *,
        dtype: torch.dtype,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        sizes: Sequence[int] = (),
        block_size: int = 16,
        backend: str = "triton",
    ) -> ModelRunner:
        """Return a runner of ``model`` whose KV blocks hold small random numbers; graphs are recorded of ``sizes``.

        Compared with steps without a graph, a size must be the very number of rows: products take another path for
        another one, and round otherwise.
        """
        spec = AttentionSpec(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=self.device,
        )
        chosen = choose_backend(backend, spec, ())
        caches = chosen.allocate(num_blocks + 1)
        for cache in caches:
            cache.normal_(std=0.5)
        runner = ModelRunner(
            model,
            chosen,
            caches,
            self.runtime(),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=(EOS,),
            graph_sizes=sizes,
        )
        runner.capture_graphs()
        return runner


class DeviceRows(PagedRows):
    """Rows whose queries, keys and values are on the device, run as the runner does: staged, copied, then computed."""

    def __init__(self, rig: Rig, spec: AttentionSpec, seq_lens: Sequence[int], limits: StepLimits) -> None:
        super().__init__(spec, seq_lens, limits=limits)
        self.rig = rig
        self.runtime = rig.runtime()
        self.queries, self.keys, self.values = (
            [part.to(rig.device) for part in parts] for parts in (self.queries, self.keys, self.values)
        )

    def run(
        self,
        backend: AttentionBackend,
        cache: Any,
        parts: Sequence[tuple[int, int, int]],
        *,
        scale: float = 0.3,
        window: int | None = None,
        padding: int = 0,
    ) -> list[torch.Tensor]:
        batch = make_batch(
            [end - begin for _, begin, end in parts],
            [end for _, _, end in parts],
            [self.blocks[row] for row, _, _ in parts],
            self.spec.block_size,
        )
        rows, tokens = len(parts), len(batch.positions)
        assert self.limits is not None
        fields = backend.step_fields(self.limits)
        inputs = {
            "slots": np.pad(np.arange(rows, 0, -1).astype(np.int32), (0, padding)),
            "query_start": np.pad(batch.query_start, (0, padding), constant_values=tokens),
            "seq_lens": np.pad(batch.seq_lens, (0, padding)),
            "slot_mapping": np.pad(batch.slot_mapping, (0, padding), constant_values=-1),
            "positions": np.pad(batch.positions, (0, padding)),
            "block_tables": np.concatenate([np.zeros_like(batch.block_table[:1]), batch.block_table[::-1]]),
        }
        own = [StepField(name, array.shape, array.dtype.type) for name, array in inputs.items()]
        buffers = StepBuffers(self.runtime, [*own, *fields])
        staged = buffers.begin()
        for name, array in inputs.items():
            staged[name][...] = array
        batch.fields = {field.name: staged[field.name] for field in fields}
        batch.device = DeviceBatch(
            **{name: buffers.device[name] for name in inputs},
            fields={field.name: buffers.device[field.name] for field in fields},
        )
        plan = backend.plan(batch)
        buffers.commit()

        def gather(rows: list[torch.Tensor]) -> torch.Tensor:
            part = torch.cat([rows[row][begin:end] for row, begin, end in parts])
            return torch.cat([part, part.new_full((padding, *part.shape[1:]), torch.nan)])

        backend.prepare(plan)
        backend.write_kv(gather(self.keys), gather(self.values), cache, plan)
        out = backend.forward(gather(self.queries), cache, plan, scale=scale, window=window)[:tokens]
        return list(out.split([end - begin for _, begin, end in parts]))


def decode_steps(runner: ModelRunner, *, num_rows: int, context: int, num_steps: int) -> list[SchedulerOutput]:
    """Return steps in which ``num_rows`` rows of ``context`` tokens, taken as computed already, decode one token each.

    Each row owns blocks of its own, where there are enough; else rows share them, which costs the device the same
    reads. The first of the steps brings the requests.
    """
    block_size = runner.backend.spec.block_size
    per_row = -(-(context + num_steps + 1) // block_size)
    num_blocks = int(runner.kv_caches[0].shape[1]) - 1
    ids = np.arange(num_rows * per_row) % num_blocks + 1
    news = [
        NewRequest(
            slot=row,
            request_id=row,
            token_ids=[3 + row % 250] * context,
            num_prompt_tokens=context,
            num_computed_tokens=context - 1,
            block_ids=ids[row * per_row : (row + 1) * per_row].tolist(),
            sampling=EngineSampling(max_tokens=num_steps + 1),
        )
        for row in range(num_rows)
    ]
    slots = list(range(num_rows))
    steps = [SchedulerOutput(step, slots, [1] * num_rows, num_rows) for step in range(num_steps)]
    steps[0].new_requests = news
    return steps


@dataclass(frozen=True)
class Timed:
    """Seconds per call: the median and the best of several rounds."""

    median_s: float
    best_s: float


def timed(rig: Rig, work: Callable[[], object], *, rounds: int, warm_up: int = 2) -> Timed:
    """Time ``work``, each round until the device is done with it."""
    runtime = rig.runtime()
    for _ in range(warm_up):
        work()
    found: list[float] = []
    for _ in range(rounds):
        runtime.synchronize()
        begun = time.perf_counter()
        work()
        runtime.synchronize()
        found.append(time.perf_counter() - begun)
    return Timed(sorted(found)[len(found) // 2], min(found))
