"""The owner of one device: brings the model up in five steps, then runs steps until it is shut down.

    init_device → load_model → determine_num_blocks → allocate_kv_cache → warm_up → execute_model …
                                                                                  ⇅ sleep, wake_up

Called from one thread, the engine's busy loop. Every public method is a target of ``collective_rpc``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from asyncllm import platforms
from asyncllm.attention.base import NAME_TO_KV_FORMAT, AttentionBackend, AttentionSpec, KVCache
from asyncllm.attention.native import NativeAttention
from asyncllm.attention.selector import choose_backend, why_others_were_not
from asyncllm.checkpoint import open_checkpoint
from asyncllm.errors import CheckpointError, ConfigError, UsageError
from asyncllm.kernels.selector import choose_kernels
from asyncllm.layers.linear_native import NativeLinearMethod
from asyncllm.models.native import NativeModel
from asyncllm.models.registry import build_model
from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.cuda_graphs import graph_sizes
from asyncllm.worker.device_runtime import DeviceRuntime, make_runtime
from asyncllm.worker.memory import KVCachePlan, MemoryProfile, plan_kv_cache
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.offload import (
    check_room,
    give_back_memory,
    move_to_device,
    move_to_host,
    telling_of_memory,
    weight_bytes,
)
from asyncllm.worker.profile_run import largest_step, measure_graph_bytes, measure_step_bytes

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import EngineConfig
    from asyncllm.executor.base import ReportProgress
    from asyncllm.kernels.base import Kernels
    from asyncllm.models.base import StepModel
    from asyncllm.worker.memory import DeviceMemory
    from asyncllm.worker.step_result import StepResult

__all__ = ["Worker"]


WARM_UP_TOKENS = 32
T = TypeVar("T")


class Worker:
    """One device with its share of the model. ``rank`` counts the workers of an engine."""

    def __init__(self, config: EngineConfig, *, report: ReportProgress, rank: int = 0) -> None:
        self.config = config
        self.rank = rank
        self.report = report
        self.platform = platforms.current(config)
        self.device = torch.device(self.platform.device)
        self.dtype = torch.float32  # until the checkpoint is there
        self.vocab_size = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self._model_max_len = 0
        self._threads_before: int | None = None
        self._runtime: DeviceRuntime | None = None
        self._kernels: Kernels | None = None
        self._checkpoint: Checkpoint | None = None
        self._model: StepModel | None = None
        self._backend: AttentionBackend | None = None
        self._kv_caches: list[KVCache] = []
        self._runner: ModelRunner | None = None
        self._spec: AttentionSpec | None = None
        self._plan: KVCachePlan | None = None
        self._profile: MemoryProfile | None = None
        self._free_bytes = 0
        self._sleep_level = 0  # 0: awake
        self._is_offloaded = False
        self.device_memory: DeviceMemory | None = None  # of a platform that has its own
        self._free_at_start_bytes = 0
        self._profiler: torch.profiler.profile | None = None
        self._profile_directory = Path()
        self._num_profiles = 0

    @property
    def attention_backend(self) -> str:
        """Return the name of the attention backend in use."""
        return self._ready(self._backend).name

    @property
    def kernels(self) -> str:
        """Return which operators the model runs on."""
        if self._kernels is None:
            return "torch"
        quantization = self.config.model.quantization
        return self._kernels.description + (f", quantization {quantization}" if quantization else "")

    @property
    def kv_cache_dtype(self) -> str:
        """Return how keys and values are stored."""
        stored_as = self._ready(self._backend).spec.kv_format
        return next(name for name, known in NAME_TO_KV_FORMAT.items() if known is stored_as)

    @property
    def block_size(self) -> int:
        """Return the tokens per KV block: the option, or, once the model is there, what its attention backend wants."""
        return self.config.cache.tokens_per_block

    @property
    def bytes_per_block(self) -> int:
        """Return the memory of one KV block over all layers."""
        return self._ready(self._backend).bytes_per_block()

    @property
    def other_backends(self) -> dict[str, str]:
        """Return the attention backends of this platform that are not in use, and why."""
        name, order = self.config.device.attention_backend, self.platform.attention_backends
        return why_others_were_not(self.attention_backend, name, self._ready(self._spec), order)

    @property
    def graph_sizes(self) -> list[int]:
        """Return the numbers of rows whose decode steps are replayed as CUDA graphs."""
        return list(self._ready(self._runner).graphs.sizes)

    @property
    def memory_plan(self) -> dict[str, int]:
        """Return what the memory holds, in bytes, by words for a reader."""
        plan, profile = self._ready(self._plan), self._profile
        found = {"free before the KV blocks": self._free_bytes} if profile is None else profile.parts()
        return found | {"KV blocks": (plan.num_blocks + 1) * self.bytes_per_block}

    def init_device(self) -> None:
        """Take the device: on a CPU, load the compiled kernels and set the number of threads in this process.

        :raises ModelError: the checkpoint is not there or damaged; it decides the dtype, and so the kernels.
        """
        self._runtime = make_runtime(self.device)
        if self.platform.has_own_memory:
            self.device_memory = self._runtime
        self._threads_before = torch.get_num_threads()
        self._checkpoint = open_checkpoint(self.config.model.model)
        name = self.config.model.dtype
        if name == "auto":
            name = self.platform.default_dtype(self._checkpoint.dtype)
        self.dtype = getattr(torch, name)
        num_threads = self.platform.num_threads(self.config.device)
        self._kernels = choose_kernels(self.config, num_threads, dtype=name, device_type=self.device.type)
        # What torch still does beside the kernels is small, and two pools of threads on the same cores would fight.
        torch.set_num_threads(1 if self._kernels is not None else num_threads)
        if self.device_memory is not None:
            self._free_at_start_bytes, _ = self.device_memory.memory_info()

    def load_model(self) -> None:
        """Build the model, load its weights and choose the attention backend.

        :raises ModelError: the checkpoint is not there, not supported or damaged.
        :raises ConfigError: ``max_model_len`` is more than the model's positions cover, or no backend serves the model.
        :raises InsufficientMemoryError: the weights do not fit.
        """
        checkpoint, self._checkpoint = self._checkpoint or open_checkpoint(self.config.model.model), None
        max_model_len, max_position = self.config.model.max_model_len, checkpoint.max_position
        if max_model_len is not None and max_model_len > max_position:
            raise ConfigError(
                f"max_model_len is {max_model_len}; the positions of this model cover {max_position}",
                parameter="max_model_len",
                value=max_model_len,
                limit=max_position,
            )
        kernels = self._kernels
        remedy = "use a smaller or quantized model, or free memory"
        with telling_of_memory("load_model", f"the weights in {self.dtype}", remedy):
            model = build_model(
                checkpoint,
                self.dtype,
                self.device,
                max_position=max_model_len,
                linear_method=NativeLinearMethod(kernels, self.config.model.quantization)
                if kernels is not None
                else None,
                report=lambda fraction: self.report("load_model", fraction),
            )
        self._model_max_len = max_position
        # Rows of embedding and head beyond the tokenizer's ids are padding.
        self.vocab_size = min(model.vocab_size, checkpoint.num_tokens or model.vocab_size)
        self.eos_token_ids = checkpoint.eos_token_ids
        spec = AttentionSpec(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            kernels=kernels,
            kv_cache_dtype=self.config.cache.kv_cache_dtype,
        )
        self._backend = self._choose_backend(spec)
        spec = self._spec = self._backend.spec
        self.config = self.config.with_block_size(spec.block_size)
        self._model = model
        if kernels is not None and isinstance(self._backend, NativeAttention):
            self._model = NativeModel(model, kernels, block_size=spec.block_size, kv_format=spec.kv_format)

    def _choose_backend(self, spec: AttentionSpec) -> AttentionBackend:
        preferred = self.platform.attention_backends
        any_block_size = self.config.cache.block_size is None
        return choose_backend(self.config.device.attention_backend, spec, preferred, any_block_size=any_block_size)

    def determine_num_blocks(self) -> KVCachePlan:
        """Return how many KV blocks this device can give and the longest request they allow.

        :raises InsufficientMemoryError: one request of the asked ``max_model_len`` does not fit.
        """
        self._profile = self.profile_memory() if self.device_memory is not None else None
        self._free_bytes = self.platform.free_memory_bytes()
        return plan_kv_cache(
            self.config,
            model_max_len=self._model_max_len,
            bytes_per_block=self.bytes_per_block,
            free_bytes=self._free_bytes,
            cap_bytes=self.platform.kv_cache_cap_bytes(),
            profile=self._profile,
        )

    def profile_memory(self) -> MemoryProfile:
        """Run the largest step and return what the device's memory has to hold besides KV blocks.

        :raises UsageError: the worker computes in the host's memory.
        """
        memory, backend = self._ready(self.device_memory), self._ready(self._backend)
        max_model_len = self.config.model.max_model_len or self._model_max_len
        block_size = self.block_size
        step = largest_step(self.config.scheduler, block_size=block_size, max_prompt_len=max(max_model_len - 1, 1))

        def make_runner() -> ModelRunner:
            return self._make_runner(backend.allocate(1), max_model_len)

        with telling_of_memory(
            "determine_num_blocks", "the largest step", "lower max_num_batched_tokens or max_num_seqs"
        ):
            step_bytes = measure_step_bytes(make_runner, step, memory)
            graph_bytes = measure_graph_bytes(make_runner, memory)
        free_bytes, total_bytes = memory.memory_info()
        return MemoryProfile(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            used_bytes=max(self._free_at_start_bytes - free_bytes, memory.allocated_bytes()),
            step_bytes=step_bytes,
            graph_bytes=graph_bytes,
        )

    def _make_runner(self, kv_caches: list[KVCache], max_model_len: int) -> ModelRunner:
        scheduler = self.config.scheduler
        return ModelRunner(
            self._ready(self._model),
            self._ready(self._backend),
            kv_caches,
            self._ready(self._runtime),
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            graph_sizes=self._graph_sizes(),
        )

    def _graph_sizes(self) -> list[int]:
        if self.config.device.enforce_eager or not self._ready(self._runtime).can_capture:
            return []
        scheduler = self.config.scheduler
        return graph_sizes(min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """Allocate ``plan.num_blocks`` blocks and the null block, and the persistent batch.

        :raises InsufficientMemoryError: the system refuses the memory.
        """
        self._plan = plan
        remedy = "lower num_blocks, or the share of the memory that KV blocks take"
        with telling_of_memory("allocate_kv_cache", f"{plan.num_blocks} KV blocks", remedy):
            self._kv_caches = self._ready(self._backend).allocate(plan.num_blocks + 1)
            self._runner = self._make_runner(self._kv_caches, plan.max_model_len)

    def warm_up(self) -> None:
        """Run a small prefill and a decode step, so that no request pays for what happens once."""
        runner, scheduler = self._ready(self._runner), self.config.scheduler
        block_size = self.block_size
        room = int(runner.batch.block_table.max_blocks) * block_size - 2
        num_tokens = max(1, min(WARM_UP_TOKENS, scheduler.max_num_batched_tokens, room, runner.batch.max_tokens - 2))
        # All of it goes to the null block, whose content no row ever sees.
        request = NewRequest(
            slot=0,
            request_id=-1,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            block_ids=[0] * (num_tokens // block_size + 1),
            sampling=EngineSampling(max_tokens=2, temperature=1.0),  # drawing is compiled as well, where it is
        )
        runner.execute(SchedulerOutput(-2, [0], [num_tokens], num_tokens, [request])).result()
        runner.execute(SchedulerOutput(-1, [0], [1], 1)).result()
        runner.batch.apply(SchedulerOutput(0, [], [], 0, freed_slots=[0]))
        runner.capture_graphs(lambda fraction: self.report("warm_up", fraction))

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepResult:
        """Launch one step and return its pending result."""
        runner = self._ready(self._runner)
        if self._profiler is None:
            return runner.execute(scheduler_output)
        rows, tokens = len(scheduler_output.slots), scheduler_output.total_num_tokens
        # The compiled kernels are no operations of torch, so the step itself has to stand in the trace.
        with torch.profiler.record_function(f"step of {tokens} tokens in {rows} rows"):
            return runner.execute(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until :meth:`wake_up`: KV blocks and batch, and the weights.

        Level 1 moves the weights of a GPU to the host and leaves those of a CPU; level 2 drops them. Idempotent; a
        worker that sleeps at level 1 may be sent to level 2. No step may be out; the batch is forgotten.

        :raises InsufficientMemoryError: the host has no room for the weights; nothing was given back.
        """
        if level <= self._sleep_level or (self._model is None and not self._sleep_level):
            return
        if self.device_memory is not None:
            self.device_memory.synchronize()
        if level == 1:
            self._offload_weights()
        self._drop(level)
        self._sleep_level = level

    def wake_up(self) -> None:
        """Bring back what :meth:`sleep` gave away, with an empty batch and as many blocks as before. Idempotent.

        :raises ModelError: the checkpoint has gone, or is another model now.
        :raises InsufficientMemoryError: somebody else has taken the memory.
        :raises Exception: whatever else failed; the worker sleeps on, and may be woken later.
        """
        level = self._sleep_level
        if not level:
            return
        plan = self._ready(self._plan)
        try:
            if level >= 2:
                self._reload_model()
            else:
                self._restore_weights()
                self._backend = self._choose_backend(self._ready(self._spec))
            self._check_room(plan)
            self.allocate_kv_cache(plan)
            self.warm_up()
        except BaseException:
            try:
                if level == 1:
                    self._offload_weights()
            finally:
                self._drop(level)
            raise
        self._sleep_level = 0

    def _offload_weights(self) -> None:
        """Move the weights to the host where they are on a device with memory of its own."""
        model = self._model
        if not self.platform.has_own_memory or self._is_offloaded or not isinstance(model, nn.Module):
            return
        room_bytes = self.platform.free_memory_bytes()
        check_room("the weights", weight_bytes(model), room_bytes, "sleep", "sleep(level=2) drops them instead")
        with telling_of_memory("sleep", "the weights on the host", "sleep(level=2) drops them instead"):
            move_to_host(model, pinned=self.device.type == "cuda")
        self._is_offloaded = True

    def _restore_weights(self) -> None:
        if self._is_offloaded and isinstance(self._model, nn.Module):
            with telling_of_memory("wake_up", "the weights", "free memory and call wake_up() again"):
                move_to_device(self._model, self.device)
            self._is_offloaded = False

    def _drop(self, level: int) -> None:
        """Let go of what an engine that sleeps at ``level`` does not keep."""
        if self._runner is not None:
            self._runner.graphs.drop()  # they hold addresses of the blocks; the next runner records its own
        self._runner = self._backend = None
        self._kv_caches = []
        if level >= 2:
            self._model = None
            self._is_offloaded = False
        give_back_memory()
        if self.device_memory is not None:
            self.device_memory.empty_cache()

    def _reload_model(self) -> None:
        """Load the model again, in silence.

        :raises CheckpointError: it is not the one that this engine was started with.
        """
        before = self._spec, self.vocab_size, self.eos_token_ids, self._model_max_len
        report, self.report = self.report, _be_silent
        try:
            self.load_model()
        finally:
            self.report = report
            found = self._spec, self.vocab_size, self.eos_token_ids, self._model_max_len
            self._spec, self.vocab_size, self.eos_token_ids, self._model_max_len = before
        if found != before:
            raise CheckpointError(
                "the checkpoint has another shape or vocabulary than when the engine was started; start a new one",
                model=self.config.model.model,
            )

    def _check_room(self, plan: KVCachePlan) -> None:
        needed_bytes = (plan.num_blocks + 1) * self.bytes_per_block
        memory = self.device_memory
        free_bytes = self.platform.free_memory_bytes() if memory is None else memory.memory_info()[0]
        check_room("the KV blocks", needed_bytes, free_bytes, "wake_up", "free memory and call wake_up() again")

    def start_profile(self, directory: str) -> None:
        """Record every operation from now on; :meth:`stop_profile` writes the trace into ``directory``.

        :raises UsageError: a recording is running already.
        """
        if self._profiler is not None:
            raise UsageError("a profile is being recorded already; stop_profile() ends it")
        self._profile_directory = Path(directory)
        self._profile_directory.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        self._profiler = profiler

    def stop_profile(self) -> str:
        """End the recording and return the path of its trace file, for Perfetto or ``chrome://tracing``.

        :raises UsageError: none is running.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise UsageError("no profile is being recorded; start_profile() begins one")
        profiler.stop()
        self._num_profiles += 1
        path = self._profile_directory / f"asyncllm-{os.getpid()}-rank{self.rank}-{self._num_profiles}.trace.json"
        profiler.export_chrome_trace(str(path))
        return str(path)

    def shutdown(self) -> None:
        """Free the model, the KV blocks and the device's settings. Idempotent, also after a failed start."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
        runtime = self._runtime
        self._profiler = self._runner = self._model = self._backend = self._threads_before = self._kernels = None
        self._runtime = self._checkpoint = self._spec = self._plan = self.device_memory = None
        self._kv_caches = []
        self._sleep_level = 0
        self._is_offloaded = False
        if runtime is not None:  # in the caller's own process the allocator would keep the memory
            runtime.close()

    def _ready(self, part: T | None) -> T:
        if part is None:
            raise UsageError("the worker is not started, asleep, or shut down already")
        return part


def _be_silent(phase: str, fraction: float | None) -> None:
    pass
