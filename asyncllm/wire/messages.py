"""Messages between the front end and the engine process.

To the engine, one tagged struct per message: ``EngineInput``. From the engine, likewise: ``EngineOutput``.
A request is known by ``request_id``, an integer that the front end never uses twice; the caller's own string stays in
the front end. One :class:`EngineCoreOutputs` per step carries the new tokens of all requests as columns.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from asyncllm.errors import ErrorInfo

__all__ = [
    "AbortRequests",
    "Configure",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDied",
    "EngineFinishReason",
    "EngineInfo",
    "EngineInput",
    "EngineOutput",
    "EngineReady",
    "EngineSampling",
    "FinishRequests",
    "FinishedRequest",
    "Grammar",
    "LogprobRows",
    "ParkRequests",
    "PinPrefix",
    "RareSampling",
    "SchedulerStats",
    "Shutdown",
    "StartupFailed",
    "StartupProgress",
    "UnpinPrefixes",
    "UtilityCall",
    "UtilityResult",
]


class EngineFinishReason(enum.IntEnum):
    """Why the engine ended a request (stop strings are found in the front end, which then aborts it)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    COMPLETE = 5  # the grammar allows nothing after the last token, whose text belongs to the output


class Grammar(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the text of an output has to match; two that are equal compile to the same."""

    parameter: str  # the field of SamplingParams that it came from, which errors name
    kind: str  # how ``text`` is written: "schema" (JSON), "regex" (of the Rust crate), "grammar" (Lark or GBNF)
    text: str


class RareSampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What few requests ask for, apart so that the others pay one byte for all of it."""

    bad_words: list[list[int]] = []  # the last id of each cannot follow an output that ends in those before it
    logprob_token_ids: list[int] = []  # reported at each output position, after the top ones
    repetition: tuple[int, int, int] | None = None  # shortest and longest pattern, and how often in a row ends it
    grammar: Grammar | None = None  # compiled in the engine core; the worker sees only the masks
    num_lookup_tokens: int = 0  # most drafts in a step, looked up in the request's own tokens


class EngineSampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The sampling of one sample with every default resolved. Temperature 0 is greedy; ids are in the vocabulary."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0  # second key of the draw: sample i of n
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int = -1  # -1: none, 0: the chosen token only, k: the k most likely too
    prompt_logprobs: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # empty: all
    rare: RareSampling | None = None

    @property
    def bad_words(self) -> list[list[int]]:
        """Return the words of ``rare``."""
        return [] if self.rare is None else self.rare.bad_words

    @property
    def logprob_token_ids(self) -> list[int]:
        """Return the ids of ``rare``."""
        return [] if self.rare is None else self.rare.logprob_token_ids

    @property
    def grammar(self) -> Grammar | None:
        """Return that of ``rare``."""
        return None if self.rare is None else self.rare.grammar


# ------------------------------------------------------------------------------------------------- to the engine
class EngineCoreRequest(msgspec.Struct, array_like=True, tag=0, gc=False):
    """One sample to generate. ``priority``: lower is more urgent; ``cache_salt`` separates prefix caches."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: EngineSampling
    priority: int = 0
    cache_salt: str | None = None
    prefix_id: int = 0  # a live request, or a pin, that shares the blocks of the tokens that both begin with


class AbortRequests(msgspec.Struct, array_like=True, tag=1):
    """Drop these requests and free their blocks; unknown ids are ignored; nothing is answered."""

    request_ids: list[int]


class FinishRequests(msgspec.Struct, array_like=True, tag=2):
    """End these requests now and answer each with a :class:`FinishedRequest` of reason ABORT."""

    request_ids: list[int]


class ParkRequests(msgspec.Struct, array_like=True, tag=3):
    """Leave these requests out of steps (``parked``) until told otherwise: their readers are too slow."""

    request_ids: list[int]
    parked: bool


class UtilityCall(msgspec.Struct, array_like=True, tag=4):
    """Call ``EngineCore.<method>(*args)`` between two steps; the :class:`UtilityResult` has the same ``call_id``."""

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, array_like=True, tag=5):
    """End the process: requests still there are dropped."""


class Configure(msgspec.Struct, array_like=True, tag=6):
    """The first message: the engine's configuration (an ``EngineConfig`` as plain data)."""

    config: dict[str, Any]


class PinPrefix(msgspec.Struct, array_like=True, tag=7):
    """Keep the KV blocks of these tokens, from the first request on that computes them and names ``pin_id``.

    Requests name it as ``prefix_id``, so it is an id that no request has.
    """

    pin_id: int
    token_ids: list[int]
    cache_salt: str | None = None


class UnpinPrefixes(msgspec.Struct, array_like=True, tag=8):
    """Let go of pinned prefixes; unknown ids are ignored; nothing is answered."""

    pin_ids: list[int]


EngineInput = (
    EngineCoreRequest
    | AbortRequests
    | FinishRequests
    | ParkRequests
    | UtilityCall
    | Shutdown
    | Configure
    | PinPrefix
    | UnpinPrefixes
)


# ----------------------------------------------------------------------------------------------- from the engine
class EngineInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the engine found out while starting."""

    max_model_len: int
    vocab_size: int  # ids that can be sampled: padding rows of the head excluded
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int  # usable ones: the null block is not counted
    kv_cache_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    attention_backend: str
    pid: int
    phase_to_seconds: dict[str, float] = {}
    kernels: str = ""  # which operators the model runs on, with instruction set and threads
    kv_cache_dtype: str = ""  # how keys and values are stored
    async_scheduling: bool = False  # whether each step is launched before the ids of the one before it are known
    device_reason: str = ""  # why this device, or which one it is
    other_backends: dict[str, str] = {}  # attention backends that were not taken, and why
    graph_sizes: list[int] = []  # numbers of rows whose decode steps are CUDA graphs
    memory_plan: dict[str, int] = {}  # what the memory holds, in bytes, in words that a reader understands
    prompt_lookup_num_tokens: int = 0  # of requests that do not say
    prompt_lookup_step_tokens: int = 0  # drafts are added to a step up to so many tokens


class StartupProgress(msgspec.Struct, array_like=True, tag=1):
    """A phase of the start-up begins (``fraction`` of it done, where that is known)."""

    phase: str
    fraction: float | None = None


class EngineReady(msgspec.Struct, array_like=True, tag=2):
    """The engine takes requests from now on."""

    info: EngineInfo


class StartupFailed(msgspec.Struct, array_like=True, tag=3):
    """The engine will not become ready; it exits after this."""

    error: ErrorInfo
    phase: str = ""


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler's state after a step, and counters since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # held by no request; a step that is out may still use some of them
    num_steps: int = 0
    num_prefill_tokens: int = 0  # prompt tokens computed, recomputation included
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache, once per admission
    prefix_hits: int = 0
    num_parked: int = 0
    resume_queries: int = 0  # the same two for requests that come back after a preemption
    resume_hits: int = 0
    is_sleeping: bool = False  # after sleep(), until wake_up()
    num_dropped_tokens: int = 0  # drawn for requests that had ended or were preempted while their step was out
    num_pinned_blocks: int = 0  # kept by pinned prefixes; not free
    num_proposed_drafts: int = 0  # guesses at next tokens that were computed
    num_accepted_drafts: int = 0  # those of them that became tokens


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """Candidates at consecutive positions of one request: at each, the chosen token, the top ones, the requested ones.

    The three columns are flat: ``width`` entries per position (1 + the number of top tokens asked for + the number of
    ``logprob_token_ids``, which stand in the order in which they were asked for).
    """

    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class FinishedRequest(msgspec.Struct, array_like=True, gc=False):
    """The end of a request; its last tokens, if any, are in the columns of the same message."""

    request_id: int
    reason: int  # EngineFinishReason
    stop_token_id: int | None = None  # the user's stop token that ended it; None for end of sequence
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: ErrorInfo | None = None


class RequestTimes(msgspec.Struct, array_like=True, gc=False):
    """Durations of one request by the engine's clock, in seconds; see :class:`asyncllm.Usage`."""

    queue_s: float  # from its arrival at the engine until the first step that took it in was made
    prefill_s: float | None = None  # from there until its first token was there; None: it ended without one


class EngineCoreOutputs(msgspec.Struct, array_like=True, tag=4, gc=False):
    """All that one step produced. ``request_ids[i]`` got the new token ``token_ids[i]``, in order.

    A request may stand more than once where it got several tokens. ``logprobs`` maps a request to the rows of its new
    tokens, ``prompt_logprobs`` to rows of the next part of its prompt (positions 1 …), only for those that asked.
    """

    request_ids: list[int] = []
    token_ids: list[int] = []
    finished: list[FinishedRequest] = []
    logprobs: dict[int, LogprobRows] = {}
    prompt_logprobs: dict[int, LogprobRows] = {}
    stats: SchedulerStats | None = None
    num_cached_tokens: dict[int, int] = {}  # of requests admitted lately, where not 0; with their first token or before
    timings: dict[int, RequestTimes] = {}  # of requests whose first token (or end without one) is in this message
    num_preemptions: dict[int, int] = {}  # of requests preempted since the last message with tokens: how often ever
    drafts: dict[int, tuple[int, int]] = {}  # of requests that had some in this step: proposed and accepted so far


class UtilityResult(msgspec.Struct, array_like=True, tag=5):
    """The answer to a :class:`UtilityCall`: a value of plain data, or an error."""

    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


class EngineDied(msgspec.Struct, array_like=True, tag=6):
    """The busy loop raised; the process exits after this."""

    error: ErrorInfo


EngineOutput = StartupProgress | EngineReady | StartupFailed | EngineCoreOutputs | UtilityResult | EngineDied
