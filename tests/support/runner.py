"""A tiny attention model without a checkpoint, and a hand-driven scheduler for :class:`ModelRunner`.

The driver follows the scheduler's rules (slots, blocks, differences) but leaves every decision to the test: which
request computes how many tokens in which step, who is preempted and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from asyncllm.attention.base import AttentionSpec
from asyncllm.attention.selector import choose_backend
from asyncllm.models.base import CausalLM, ForwardContext
from asyncllm.wire.messages import EngineSampling, LogprobRows
from asyncllm.wire.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from asyncllm.worker.device_runtime import CpuRuntime
from asyncllm.worker.model_runner import ModelRunner
from tests.support.emulated_device import EmulatedRuntime

VOCAB = 97
PADDED_VOCAB = 104
GRAPH_SIZES = [1, 2, 4]  # of up to 8 rows: larger decode steps run without a graph
POISON = 96  # a token whose embedding is not finite


class TinyModel(CausalLM):
    """Two attention layers over random weights; rows of the head past ``VOCAB`` are padding with high logits."""

    num_layers, num_heads, num_kv_heads, head_dim = 2, 4, 2, 8
    vocab_size, max_position = PADDED_VOCAB, 512

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32, window: int | None = None) -> None:
        super().__init__()
        self.attention_dtype, self.window = dtype, window
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * scale

        self.embedding = random(PADDED_VOCAB, 32, scale=1.0)
        self.embedding[POISON] = torch.nan
        self.place = random(512, 32, scale=0.5)
        self.head = random(PADDED_VOCAB, 32, scale=0.8)
        self.head[VOCAB:] *= 50
        self.head[POISON] = 0  # nobody draws it
        self.qkv = [random(32, 64, scale=0.25) for _ in range(2)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("this model has its weights")

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = self.embedding[token_ids] + self.place[positions]
        for layer, weight in enumerate(self.qkv):
            query, key, value = (hidden @ weight).to(self.attention_dtype).split([32, 16, 16], 1)
            cache = context.kv_caches[layer]
            context.backend.write_kv(key.unflatten(1, (2, 8)), value.unflatten(1, (2, 8)), cache, context.plan)
            query = query.unflatten(1, (4, 8))
            attended = context.backend.forward(query, cache, context.plan, scale=0.4, window=self.window)
            hidden = torch.tanh(hidden + attended)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


def make_runner(
    *,
    num_slots: int = 8,
    num_blocks: int = 128,
    block_size: int = 4,
    max_model_len: int = 200,
    max_num_batched_tokens: int = 512,
    backend: str = "reference",
    eos_token_ids: tuple[int, ...] = (0,),
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> ModelRunner:
    """Return a runner of the tiny model; backend ``device``: as on a GPU, with Triton kernels and recorded graphs.

    ``flash_attn``: as there, with another backend. ``dtype``: of queries, keys and values.
    """
    model, on_device = TinyModel(dtype=dtype, window=window), backend in ("device", "flash_attn")
    spec = AttentionSpec(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    chosen = choose_backend("triton" if backend == "device" else backend, spec, ())
    runner = ModelRunner(
        model,
        chosen,
        chosen.allocate(num_blocks + 1),
        EmulatedRuntime() if on_device else CpuRuntime(),
        max_num_seqs=num_slots,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        graph_sizes=[size for size in GRAPH_SIZES if on_device and size <= min(num_slots, max_num_batched_tokens)],
    )
    runner.capture_graphs()
    return runner


@dataclass
class DrivenRequest:
    request_id: int
    prompt: list[int]
    sampling: EngineSampling
    output: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


class Driver:
    """Schedules by hand. Blocks are handed out last freed first, so that a reused one is reused at once."""

    def __init__(self, runner: ModelRunner, *, num_slots: int = 8, num_blocks: int = 128, block_size: int = 4) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(1, num_blocks + 1))
        self.requests: dict[int, DrivenRequest] = {}
        self.freed: list[int] = []
        self.step_id = 0

    def add(self, request_id: int, prompt: Sequence[int], sampling: EngineSampling) -> DrivenRequest:
        request = self.requests[request_id] = DrivenRequest(request_id, list(prompt), sampling)
        return request

    def step(self, num_tokens: Mapping[int, int]) -> ModelRunnerOutput:
        """Run one step in which each request computes so many tokens, in the mapping's order."""
        return self.finish_step(num_tokens, self.runner.execute(self.plan(num_tokens)).result())

    def plan(self, num_tokens: Mapping[int, int]) -> SchedulerOutput:
        self.step_id += 1
        step = SchedulerOutput(
            self.step_id, [], list(num_tokens.values()), sum(num_tokens.values()), freed_slots=self.freed
        )
        self.freed = []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            needed = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            blocks = [self.free_blocks.pop() for _ in range(needed)]
            request.blocks += blocks
            if request.slot is None:
                request.slot = self.free_slots.pop()
                step.new_requests.append(
                    NewRequest(
                        request.slot,
                        request_id,
                        request.tokens,
                        len(request.prompt),
                        request.computed,
                        list(request.blocks),
                        request.sampling,
                    )
                )
            elif blocks:
                step.block_slots.append(request.slot)
                step.block_ids.append(blocks)
            step.slots.append(request.slot)
            request.computed += count
        return step

    def finish_step(self, num_tokens: Mapping[int, int], output: ModelRunnerOutput) -> ModelRunnerOutput:
        assert output.step_id == self.step_id
        for request_id, token in zip(num_tokens, output.token_ids, strict=True):
            request = self.requests[request_id]
            assert request.slot is not None
            assert (token >= 0) == (request.computed == len(request.tokens)) or request.slot in output.failed
            if token >= 0:
                request.output.append(token)
            if rows := output.logprobs.get(request.slot):
                request.logprobs.append(rows)
            if rows := output.prompt_logprobs.get(request.slot):
                request.prompt_logprobs.append(rows)
        return output

    def release(self, request_id: int) -> DrivenRequest:
        """Take the request's slot and blocks away: it ended, or is preempted and starts again in its next step."""
        request = self.requests[request_id]
        assert request.slot is not None
        self.freed.append(request.slot)
        self.free_slots.append(request.slot)
        self.free_blocks += request.blocks
        request.slot, request.blocks, request.computed = None, [], 0
        return request

    def generate(self, count: int, *, chunk: int = 1000) -> dict[int, list[int]]:
        """Run all requests until each has ``count`` output tokens, at most ``chunk`` tokens of each per step."""
        while True:
            todo = {
                request.request_id: min(chunk, len(request.tokens) - request.computed)
                for request in self.requests.values()
                if len(request.output) < count
            }
            if not todo:
                return {request_id: request.output for request_id, request in self.requests.items()}
            self.step(todo)
