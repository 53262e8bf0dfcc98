"""Engine options: frozen dataclasses, one per concern, composed in :class:`EngineConfig`.

The caller's process builds it (:meth:`EngineConfig.from_options`), it crosses to the engine process as plain data, and
nobody changes it there: what the engine finds out (blocks, their size, true context length) travels in
:class:`asyncllm.wire.messages.EngineInfo`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec

from asyncllm.errors import ConfigError, shown
from asyncllm.sampling_params import MAX_LOOKUP_TOKENS

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "FrontendConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
]

AUTO = "auto"
DEFAULT_BLOCK_SIZE = 16
WORDS = {"bool": "True or False", "float": "a number", "int": "an integer", "int | None": "an integer or None"}
MAX_INTEGER = 2**63 - 1
LOOKUP_STEP_TOKENS_CPU, LOOKUP_STEP_TOKENS_GPU = 32, 256
LOOKUP_FREE_TOKENS_CPU, LOOKUP_FREE_TOKENS_GPU = 8, 64
# On a CPU, SmolLM2 in bfloat16: one row with 1, 4, 8, 16 tokens takes 8.6, 9.0, 10.6, 17.9 ms a step, and eight rows
# with 1, 2, 4, 8 each 12.6, 19.6, 33, 59 ms. By benchmarks/speculation.py eight streams gained as much with 32 as with
# 64, and lost less where guesses were wrong. The numbers for a GPU are estimates.


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and in which numbers."""

    model: str
    """A Hugging Face folder, a ``.gguf`` file, or an id that is in the local Hugging Face cache."""
    tokenizer: str | None = None
    """Folder or ``.gguf`` file to take the tokenizer from; ``None``: the model's own."""
    chat_template: str | None = None
    """Jinja text of a chat template that replaces the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = AUTO
    """Arithmetic and weight dtype. ``auto`` on a CPU: float32, equal to transformers in float32. ``auto`` on a GPU: as
    stored if that is bfloat16 or float16, else bfloat16; ``float32`` gives exactness there too, at half the speed."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantize weights that are stored unquantized, in groups of 32, and multiply all quantized weights in integers."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; ``None``: what the model was made for, lowered if memory holds less."""

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.quantization not in (None, "int8", "int4"):
            _refuse("quantization", self.quantization, "None, 'int8' or 'int4'")
        _at_least("max_model_len", self.max_model_len, 1)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None
    """Tokens per KV block; ``None``: what the attention backend wants, 16 for all but flash-attn 2, which takes 256."""
    num_blocks: int | None = None
    """KV blocks to allocate; ``None``: measured at start-up from free memory."""
    kv_cache_bytes: int | None = None
    """Memory for KV blocks in bytes; ``None``: a share of what is free (``memory_fraction``, on a GPU
    ``gpu_memory_utilization``), bounded by need."""
    memory_fraction: float = 0.4
    """On a CPU: share of the free memory that KV blocks may take. Without effect on a GPU."""
    gpu_memory_utilization: float = 0.9
    """On a GPU: share of its whole memory that this engine may take, weights and CUDA graphs included. Without effect
    on a CPU."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal token prefixes."""
    max_pinned_fraction: float = 0.5
    """Share of the KV blocks that pinned prefixes may take (``llm.prefix``)."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = AUTO
    """How keys and values are stored. ``auto``: as ``dtype``; ``int8``: a scale for each token and head."""

    @property
    def tokens_per_block(self) -> int:
        """The block size; 16 while it is open."""
        return self.block_size or DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _at_least("num_blocks", self.num_blocks, 2)
        _at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        if not 0.0 < self.memory_fraction <= 1.0:
            _refuse("memory_fraction", self.memory_fraction, "in (0, 1]")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            _refuse("gpu_memory_utilization", self.gpu_memory_utilization, "in (0, 1]")
        if not 0.0 <= self.max_pinned_fraction <= 1.0:
            _refuse("max_pinned_fraction", self.max_pinned_fraction, "in [0, 1]")
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "float32", "bfloat16", "float16", "int8"))


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int = 256
    """Most requests that run at once."""
    max_num_batched_tokens: int = 1024
    """Token budget of one step; long prompts are prefilled in chunks of it."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in one step; 0: only the budget bounds it."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """``priority``: lower ``priority`` first, then arrival; a more urgent request may preempt."""
    async_scheduling: bool | Literal["auto"] = AUTO
    """Launch each step before the ids of the one before it are known. ``auto``: on a GPU, not on a CPU."""
    prompt_lookup_num_tokens: int = 0
    """``SamplingParams.prompt_lookup_num_tokens`` of requests that do not say; 0: nothing is looked up."""
    prompt_lookup_step_tokens: int | None = None
    """Tokens are looked up only as long as a step has no more than this many tokens, for beyond it each costs as much
    as it may gain. ``None``: 32 on a CPU, 256 on a GPU."""

    def lookup_step_tokens(self, device: str) -> int:
        """Return ``prompt_lookup_step_tokens``, or what is right for a device."""
        if self.prompt_lookup_step_tokens is not None:
            return self.prompt_lookup_step_tokens
        return LOOKUP_STEP_TOKENS_GPU if device.startswith("cuda") else LOOKUP_STEP_TOKENS_CPU

    def lookup_free_tokens(self, device: str) -> int:
        """Return how many tokens a step may have that cost about as much as one: the weights are read once."""
        return LOOKUP_FREE_TOKENS_GPU if device.startswith("cuda") else LOOKUP_FREE_TOKENS_CPU

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, 0)
        if self.prompt_lookup_num_tokens > MAX_LOOKUP_TOKENS:
            _refuse("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, f"at most {MAX_LOOKUP_TOKENS}")
        _at_least("prompt_lookup_step_tokens", self.prompt_lookup_step_tokens, 0)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _one_of("policy", self.policy, ("fcfs", "priority"))
        if not isinstance(self.async_scheduling, bool) and self.async_scheduling != AUTO:
            _refuse("async_scheduling", self.async_scheduling, "True, False or 'auto'")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Where the workers run."""

    executor: str = "uniproc"
    """``uniproc``, or the qualified name of an :class:`asyncllm.executor.base.Executor` subclass."""
    worker_cls: str = AUTO
    """Qualified name of the worker class, resolved in the worker's process; ``auto``: the platform's."""
    executor_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Plain data handed to a custom executor."""

    @property
    def runs_own_models(self) -> bool:
        """Whether executor and worker are those of this package, so that the architecture has to be one of its own."""
        return self.executor == "uniproc" and self.worker_cls == AUTO

    def __post_init__(self) -> None:
        if self.executor != "uniproc" and "." not in self.executor:
            _refuse("executor", self.executor, "'uniproc' or a qualified class name such as 'package.module.Class'")
        if self.worker_cls != AUTO and "." not in self.worker_cls:
            _refuse("worker_cls", self.worker_cls, "'auto' or a qualified class name such as 'package.module.Class'")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which device and which kernels."""

    device: str = AUTO
    """``auto`` (a GPU that can serve, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``."""
    attention_backend: str = AUTO
    """``auto``; on a GPU ``triton``; on a CPU ``native`` (compiled), ``cpu`` (torch) or
    ``reference``; the last two run the whole model on torch."""
    enforce_eager: bool = False
    """On a GPU: launch every operation of every step anew instead of replaying CUDA graphs; slower, saves memory."""
    num_threads: int | None = None
    """Threads of one CPU worker; ``None``: the cores this process may use."""
    share_cores: bool = False
    """Give way to the application on its cores: the engine's process runs at low priority and never spins."""

    def __post_init__(self) -> None:
        _at_least("num_threads", self.num_threads, 1)


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The caller's side."""

    in_process: bool = False
    """Run the engine in the caller's process (``LLM`` and ``LLMEngine`` only); for tests and debuggers."""
    startup_timeout_s: float = 600.0
    """Seconds the engine may take to become ready (``ASYNCLLM_STARTUP_TIMEOUT_S`` where the option is not given)."""
    shutdown_timeout_s: float = 5.0
    """Seconds a closing engine gets before it is killed."""
    max_buffered_tokens: int = 4096
    """Tokens a stream may hold for a slow reader; past it the engine parks that request until the reader caught up."""
    tool_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = AUTO
    """How ``chat`` finds tool calls. ``auto``: as the chat template writes them; ``none``: they are content."""
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = AUTO
    """How ``chat`` finds reasoning. ``auto``: by the markers that the chat template has; ``none``: it is content."""

    def __post_init__(self) -> None:
        if not self.startup_timeout_s > 0:
            _refuse("startup_timeout_s", self.startup_timeout_s, "positive")
        if not self.shutdown_timeout_s >= 0:
            _refuse("shutdown_timeout_s", self.shutdown_timeout_s, "zero or more")
        _at_least("max_buffered_tokens", self.max_buffered_tokens, 1)
        _one_of("tool_parser", self.tool_parser, ("auto", "none", "hermes", "llama3_json", "mistral"))
        _one_of("reasoning_parser", self.reasoning_parser, ("auto", "none", "think", "mistral"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is started with.

    :raises ConfigError: an option is unknown, out of range, or two of them contradict each other.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)

    def __post_init__(self) -> None:
        if self.device.share_cores and self.frontend.in_process:
            _refuse("share_cores", True, "False with in_process=True: only an engine process of its own can give way")

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Return the configuration that flat keyword options describe (``max_num_seqs=8``, ``block_size=32`` …).

        :raises ConfigError: an option is unknown (the nearest known one is named) or out of range.
        """
        sections = {f.name: _section_class(f.name) for f in dataclasses.fields(cls)}
        owner = {f.name: section for section, kind in sections.items() for f in dataclasses.fields(kind)}
        values: dict[str, dict[str, Any]] = {section: {} for section in sections}
        for name, value in {**options, "model": model}.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"there is no engine option {name!r}{hint}", parameter=name)
            is_path = isinstance(value, os.PathLike)
            values[owner[name]][name] = os.fspath(cast("os.PathLike[str]", value)) if is_path else value
        for section, kind in sections.items():
            _check_types(kind, values[section])
        return cls(**{section: kind(**values[section]) for section, kind in sections.items()})

    def with_block_size(self, block_size: int) -> EngineConfig:
        """Return this configuration with the block size that the worker's attention backend has."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, block_size=block_size))


def _section_class(section: str) -> type[Any]:
    return {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "parallel": ParallelConfig,
        "device": DeviceConfig,
        "frontend": FrontendConfig,
    }[section]


def _check_types(kind: type[Any], values: dict[str, Any]) -> None:
    """Refuse values of the wrong type, which the section itself does not look for."""
    kinds = get_type_hints(kind)
    for f in dataclasses.fields(kind):
        known = kinds[f.name]
        if f.name not in values or any(get_origin(kind) is Literal for kind in (known, *get_args(known))):
            continue
        try:
            msgspec.convert(values[f.name], known)
        except (msgspec.ValidationError, UnicodeEncodeError):
            _refuse(f.name, values[f.name], WORDS.get(str(f.type), f"of type {f.type}"))


def _refuse(parameter: str, value: Any, limit: str) -> None:
    value = shown(value)
    raise ConfigError(f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit)


def _at_least(parameter: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_INTEGER:  # pyright: ignore[reportUnnecessaryIsInstance]
        _refuse(parameter, value, f"an integer of at least {low}")


def _one_of(parameter: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        _refuse(parameter, value, "one of " + ", ".join(repr(name) for name in known))
