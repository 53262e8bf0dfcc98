"""A prompt and :class:`SamplingParams` to engine requests; everything that can be wrong with a request is found here.

Limits come from the checkpoint until the engine has told the true ones (:meth:`InputProcessor.set_info`). No I/O;
encoding a long text takes CPU time, so a loop calls :meth:`InputProcessor.process` in a thread where
:meth:`InputProcessor.is_long` says so.

The rules, in one place:

* A prompt has at least one token. ``max_model_len`` counts prompt and output, and one output token has to fit, so the
  longest prompt has ``max_model_len - 1`` tokens. A text that cannot be that short is refused before it is encoded.
* A prompt whose tokens plus one do not fit the engine's KV blocks could never run and is refused.
* ``max_tokens`` is lowered to what is left of the context; ``None`` means all of that.
* Fields that are ``None`` take the value of the model's ``generation_config.json``, else the neutral one.
* With ``truncate_prompt_tokens`` the front of the prompt is cut first, of ids after a text was encoded as a whole; what
  is left is checked.
* Prompt ids, stop ids, ``logit_bias``, ``allowed_token_ids`` and ``logprob_token_ids`` name tokens of the model's
  vocabulary, and ``bad_words`` are made of such; some token may be drawn: not all that are allowed are bad words, or,
  with ``min_tokens``, end the text.
* ``n`` samples are n engine requests with the same seed and prompt, told apart by ``sample_index``.
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncllm.errors import CheckpointError, InvalidParameterError, PromptTooLongError, RequestTooLargeError, shown
from asyncllm.frontend.chat import ChatProcessor
from asyncllm.frontend.parsing.select import OutputFormat
from asyncllm.frontend.structured import is_long_structure, make_grammar, schema_grammar
from asyncllm.frontend.tokenizer import LONG_TEXT_CHARS, DecodeStyle
from asyncllm.sampling_params import SamplingParams
from asyncllm.wire.messages import EngineCoreRequest, EngineInfo, EngineSampling, Grammar, RareSampling

if TYPE_CHECKING:
    from asyncllm.checkpoint import Checkpoint
    from asyncllm.config import EngineConfig
    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["InputProcessor", "ProcessedRequest", "Prompt"]

Prompt = str | Sequence[int]

LONG_PROMPT_IDS = 50_000
"""Checking this many ids takes some milliseconds."""
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRequest:
    """A checked request: what to send, and what the front end keeps of it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineCoreRequest]
    """One per sample, in order of ``index``."""
    submitted_at: float
    """:func:`time.perf_counter` when the request came in."""
    after: Sequence[int] = ()
    """The end of the prompt that is another request's output: the text goes on after it."""
    output: OutputFormat | None = None
    """How the output is cut into channels; ``None``: it is content."""

    @property
    def engine_ids(self) -> list[int]:
        """Return the engine's ids of all samples."""
        return [request.request_id for request in self.requests]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_kv_tokens: int | None
    block_size: int


class InputProcessor:
    """Checks requests and builds what is sent. Safe to use from several threads.

    :raises CheckpointError: ``generation_config.json`` holds a sampling default that is out of range.
    :raises ConfigError: the option ``chat_template`` is not a template.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._defaults = _generation_defaults(checkpoint)
        self._limits = _Limits(
            max_model_len=config.model.max_model_len or checkpoint.max_position,
            vocab_size=checkpoint.vocab_size,
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            num_kv_tokens=None,
            block_size=config.cache.tokens_per_block,
        )
        self._num_lookup_tokens = config.scheduler.prompt_lookup_num_tokens
        self.chat = ChatProcessor(config, checkpoint, tokenizer)
        """Makes the prompts of chat requests, to be passed to :meth:`process` with ``add_special_tokens=False``."""
        self._engine_ids = itertools.count(1)
        self._names = itertools.count(1)
        self._name_prefix = f"request-{os.urandom(4).hex()}-"

    def set_info(self, info: EngineInfo) -> None:
        """Take the limits that the engine found out while starting."""
        self._limits = _Limits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
            num_kv_tokens=info.num_blocks * info.block_size,
            block_size=info.block_size,
        )

    def make_engine_id(self) -> int:
        """Return an id for the engine that nothing else has."""
        return next(self._engine_ids)

    @property
    def max_prompt_len(self) -> int:
        """Return the length of the longest prompt in tokens."""
        return self._limits.max_model_len - 1

    def is_long(self, prompt: object, *, truncates: bool = False) -> bool:
        """Return whether :meth:`process` takes so long that an event loop should call it in a thread. O(1).

        ``truncates``: it will cut the prompt, so that no text is refused for its length.
        """
        if isinstance(prompt, str):
            return self._tokenizer.is_long(prompt) and (truncates or not self._cannot_fit(prompt))
        return isinstance(prompt, Sequence) and len(cast("Sequence[object]", prompt)) >= LONG_PROMPT_IDS

    def has_long_params(self, params: SamplingParams) -> bool:
        """Return whether ``params`` hold words or a schema that take so long, whatever the prompt. O(words)."""
        if params.structure is not None and is_long_structure(params):
            return True
        return 2 * sum(map(len, params.bad_words or ())) >= LONG_TEXT_CHARS  # each is encoded twice

    def is_long_chat(self, messages: object) -> bool:
        """Return whether rendering and processing ``messages`` take so long that they belong in a thread."""
        try:
            return _num_chars(messages) >= LONG_TEXT_CHARS
        except RecursionError:  # to be refused by the template
            return True

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        output: OutputFormat | None = None,
        prefix_id: int = 0,
        num_after: int = 0,
    ) -> ProcessedRequest:
        """Return the engine requests for ``prompt``, a text or token ids; ids are taken as they are.

        ``output`` says how what comes back is read; without text (``detokenize=False``) it is not. ``prefix_id``: the
        engine's id of a request or pin that begins with the same tokens. ``num_after``: so many ids at the prompt's
        end are output whose text was delivered.

        Whether ``request_id`` is in use is found by :meth:`OutputProcessor.add_request`; ``None`` makes one up.

        :raises TypeError: ``request_id`` is no string.
        :raises InvalidParameterError: an argument, a field of ``params`` or a prompt id is out of range.
        :raises PromptTooLongError: the prompt has more than ``max_model_len - 1`` tokens.
        :raises RequestTooLargeError: prompt and one output token need more KV blocks than there are.
        """
        submitted_at = time.perf_counter()
        if request_id is None:
            request_id = self._name_prefix + str(next(self._names))
        params = SamplingParams() if params is None else params
        _check_arguments(request_id, params, priority, cache_salt)
        bad_words = self._bad_words(params.bad_words) if params.bad_words else []
        self._check_params(params, bad_words)
        grammar = self._grammar(params, None if output is None else output.schema)
        num_kept = None if params.truncate_prompt_tokens is None else self._num_kept(params)
        ids = self._prompt_ids(prompt, add_special_tokens, num_kept)
        self._check_prompt(ids)
        num_lookup_tokens = params.prompt_lookup_num_tokens
        num_lookup_tokens = self._num_lookup_tokens if num_lookup_tokens is None else num_lookup_tokens
        samplings = self._samplings(params, len(ids), _rare(params, bad_words, grammar, num_lookup_tokens))
        requests = [
            EngineCoreRequest(next(self._engine_ids), ids, sampling, priority, cache_salt, prefix_id)
            for sampling in samplings
        ]
        return ProcessedRequest(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            requests=requests,
            submitted_at=submitted_at,
            after=ids[len(ids) - num_after :] if num_after else (),
            output=output if params.detokenize else None,
        )

    # ------------------------------------------------------------------------------------------------- the prompt
    def _prompt_ids(self, prompt: Any, add_special_tokens: bool, num_kept: int | None) -> list[int]:
        """Return the ids of ``prompt``: the last ``num_kept``, or all for ``None``."""
        if isinstance(prompt, str):
            if not prompt:
                _refuse("prompt", "", "a text that is not empty", "prompt is empty")
            if num_kept is None and self._cannot_fit(prompt):
                num_tokens = self._tokenizer.min_num_tokens(len(prompt))
                raise self._too_long(f"{len(prompt)} characters, which are at least {num_tokens} tokens", num_tokens)
            ids = self._tokenizer.encode(prompt, add_special_tokens)
        else:
            ids = _plain_ids(prompt)
        return ids if num_kept is None else ids[-num_kept:]

    def _num_kept(self, params: SamplingParams) -> int:
        """Return how many tokens ``truncate_prompt_tokens`` leaves of a prompt, at most."""
        wanted, limits = params.truncate_prompt_tokens, self._limits
        assert wanted is not None
        if wanted > 0:
            if wanted > self.max_prompt_len:
                limit = f"at most {self.max_prompt_len} (max_model_len {limits.max_model_len} less one output token)"
                _refuse("truncate_prompt_tokens", wanted, limit)
            return wanted
        num_output, room = params.max_tokens or 1, limits.max_model_len
        if limits.num_kv_tokens is not None:
            room = min(room, limits.num_kv_tokens)
        if num_output >= room:
            limit = f"at most {room - 1} with truncate_prompt_tokens=-1, for one prompt token to fit {room} in all"
            _refuse("max_tokens", num_output, limit)
        return room - num_output

    def _cannot_fit(self, text: str) -> bool:
        return self._tokenizer.min_num_tokens(len(text)) > self.max_prompt_len

    def _too_long(self, length: str, num_tokens: int) -> PromptTooLongError:
        limit = self.max_prompt_len
        return PromptTooLongError(
            f"prompt has {length}; the longest prompt has {limit} (max_model_len {limit + 1} less one output token): "
            "shorten it, set truncate_prompt_tokens, or raise max_model_len",
            parameter="prompt",
            value=num_tokens,
            limit=limit,
        )

    def _check_prompt(self, ids: list[int]) -> None:
        limits = self._limits
        if not ids:
            _refuse("prompt", 0, "at least one token", "prompt has no tokens")
        if len(ids) > self.max_prompt_len:
            raise self._too_long(f"{len(ids)} tokens", len(ids))
        if min(ids) < 0 or max(ids) >= limits.vocab_size:
            index = next(index for index, token_id in enumerate(ids) if not 0 <= token_id < limits.vocab_size)
            self._refuse_id(f"prompt[{index}]", ids[index])
        if limits.num_kv_tokens is not None and len(ids) + 1 > limits.num_kv_tokens:
            num_needed, num_blocks = -(-(len(ids) + 1) // limits.block_size), limits.num_kv_tokens // limits.block_size
            raise RequestTooLargeError(
                f"prompt has {len(ids)} tokens; with one output token it needs {num_needed} KV blocks of "
                f"{limits.block_size} tokens, the engine has {num_blocks}",
                parameter="prompt",
                value=len(ids),
                limit=limits.num_kv_tokens - 1,
            )

    def _refuse_id(self, parameter: str, token_id: int) -> NoReturn:
        limit = f"a token id in 0 … {self._limits.vocab_size - 1}"
        _refuse(parameter, token_id, limit, f"{parameter} is {shown(token_id)}")

    # ----------------------------------------------------------------------------------------------- the sampling
    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell ``words`` with and without a space before them, each once."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word  # a word of nothing but white space is meant as it stands
            for text in (bare, word if bare.isspace() else " " + bare):
                ids = self._tokenizer.encode(text, False)
                if not ids and text is bare:
                    _refuse("bad_words", word, "words of at least one token")
                for token_id in ids:
                    if token_id >= self._limits.vocab_size:
                        limit = f"words whose tokens are in 0 … {self._limits.vocab_size - 1}"
                        _refuse("bad_words", word, limit, f"bad_words has {word!r}, which holds token {token_id}")
                if ids:
                    found[tuple(ids)] = None
        return [list(ids) for ids in found]

    def _check_params(self, params: SamplingParams, bad_words: list[list[int]]) -> None:
        columns: tuple[tuple[str, Iterable[int] | None], ...] = (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
        )
        for name, ids in columns:
            for token_id in ids or ():
                if token_id >= self._limits.vocab_size:
                    self._refuse_id(f"{name}[{token_id}]" if name == "logit_bias" else name, token_id)
        if params.min_tokens or bad_words:
            self._check_any_token(params, {ids[0] for ids in bad_words if len(ids) == 1})

    def _check_any_token(self, params: SamplingParams, bad: set[int]) -> None:
        """Refuse a request that could draw no token at first: each is a bad word or would end it too early."""
        limit, excluded = "such that some token is no bad word", bad
        if params.min_tokens:
            excluded = bad.union(params.stop_token_ids or ())
            if not params.ignore_eos:
                excluded |= self._limits.eos_token_ids
            limit = f"such that some token does not end the text before min_tokens ({params.min_tokens})"
            limit += " and is no bad word" if bad else ""
        if params.allowed_token_ids is not None and excluded.issuperset(params.allowed_token_ids):
            _refuse("allowed_token_ids", params.allowed_token_ids, limit)
        if len(excluded) >= self._limits.vocab_size:
            name = "bad_words" if bad else "stop_token_ids"
            _refuse(name, getattr(params, name), limit)

    def _grammar(self, params: SamplingParams, call_schema: Mapping[str, Any] | None) -> Grammar | None:
        """Return what the output has to match; what only compiling shows is found in the engine.

        ``call_schema`` is that of a tool call, where one is demanded.
        """
        name = params.structure
        if call_schema is not None:
            if name is not None:
                _refuse(name, getattr(params, name), "absent where tool_choice demands a call")
            return schema_grammar("tool_choice", call_schema)
        if name is None:
            return None
        if self._tokenizer.style is DecodeStyle.GENERAL:
            limit = "absent: this model's tokens have no text of their own, so that no grammar can be followed"
            _refuse(name, getattr(params, name), limit)
        return make_grammar(params)

    def _samplings(
        self, params: SamplingParams, num_prompt_tokens: int, rare: RareSampling | None
    ) -> list[EngineSampling]:
        room = self._limits.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        value = {name: self._resolved(params, name) for name in GENERATION_DEFAULTS}
        seed = params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little") if value["temperature"] else 0
        return [
            EngineSampling(
                max_tokens=max_tokens,
                temperature=float(value["temperature"]),
                top_k=min(int(value["top_k"]), self._limits.vocab_size),
                top_p=float(value["top_p"]),
                min_p=float(value["min_p"]),
                seed=seed,
                sample_index=index,
                min_tokens=min(params.min_tokens, max_tokens),
                ignore_eos=params.ignore_eos,
                stop_token_ids=list(params.stop_token_ids or ()),
                logprobs=(params.logprobs or 0) if params.wants_logprobs else -1,
                # The prompt is the same for all samples: one of them reports on it.
                prompt_logprobs=-1 if params.prompt_logprobs is None or index else params.prompt_logprobs,
                presence_penalty=float(params.presence_penalty),
                frequency_penalty=float(params.frequency_penalty),
                repetition_penalty=float(value["repetition_penalty"]),
                logit_bias={token_id: float(bias) for token_id, bias in (params.logit_bias or {}).items()},
                allowed_token_ids=list(params.allowed_token_ids or ()),
                rare=rare,
            )
            for index in range(params.n)
        ]

    def _resolved(self, params: SamplingParams, name: str) -> float:
        given = getattr(params, name)
        return self._defaults[name] if given is None else given


def _rare(
    params: SamplingParams, bad_words: list[list[int]], grammar: Grammar | None, num_lookup_tokens: int
) -> RareSampling | None:
    """Return what of ``params`` few requests use; ``None`` where this is none of them."""
    watched = params.repetition_detection
    is_plain = not bad_words and params.logprob_token_ids is None and watched is None
    if is_plain and grammar is None and not num_lookup_tokens:
        return None
    return RareSampling(
        bad_words,
        list(params.logprob_token_ids or ()),
        None if watched is None else (watched.min_pattern_size, watched.max_pattern_size, watched.min_count),
        grammar,
        num_lookup_tokens,
    )


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _generation_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the value of each field that a caller may leave open."""
    given = {
        name: checkpoint.generation_config[name]
        for name in GENERATION_DEFAULTS
        if checkpoint.generation_config.get(name) is not None
    }
    try:
        SamplingParams(**given)
    except InvalidParameterError as error:
        raise CheckpointError(
            f"generation_config.json of {checkpoint.source!r}: {error}",
            model=checkpoint.source,
            file="generation_config.json",
        ) from error
    return {**NEUTRAL, **given}


def _num_chars(value: object) -> int:
    """Return how many characters of text are in ``value``, however nested."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, cast("Mapping[object, object]", value).values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_num_chars, cast("Sequence[object]", value)))
    return 0


# ------------------------------------------------------------------------------------------------------- checks
def _check_arguments(request_id: Any, params: Any, priority: Any, cache_salt: Any) -> None:
    if not isinstance(request_id, str):
        raise TypeError(f"request_id is {request_id!r} of type {type(request_id).__name__}; it must be a string")
    if not request_id:
        _refuse("request_id", "", "a string that is not empty", "request_id is empty")
    if not isinstance(params, SamplingParams):
        _refuse("params", params, "SamplingParams", f"params is a {type(params).__name__}")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        _refuse("priority", priority, "an integer of 64 bits")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        _refuse("cache_salt", cache_salt, "a string that is not empty")
    if cache_salt is not None and any("\ud800" <= letter <= "\udfff" for letter in cache_salt):
        _refuse("cache_salt", cache_salt, "text that UTF-8 can hold")


def _plain_ids(prompt: Any) -> list[int]:
    """Return ``prompt`` as a list of plain integers; other integer types (numpy's) are converted.

    :raises InvalidParameterError: it is no sequence of integers; names the first bad index.
    """
    if isinstance(prompt, (bytes, bytearray, memoryview, Mapping)) or not isinstance(prompt, Iterable):
        kind = type(cast("object", prompt)).__name__
        _refuse("prompt", cast("object", prompt), "a text or token ids", f"prompt is a {kind}")
    ids = list(cast("Iterable[Any]", prompt))
    if set(map(type, ids)) <= {int}:
        return ids
    for index, token_id in enumerate(ids):
        try:
            if isinstance(token_id, bool):
                raise TypeError
            ids[index] = operator.index(token_id)
        except TypeError:
            _refuse(f"prompt[{index}]", token_id, f"an integer token id{_hint(token_id)}")
    return ids


def _hint(item: object) -> str:
    """Return what to do with a prompt that is a list of such items."""
    if isinstance(item, Mapping):
        return "; for messages use chat()"
    return "; one prompt per call: asyncio.gather them, llm.map, or use LLM" if isinstance(item, str) else ""


def _refuse(parameter: str, value: object, limit: str, what: str | None = None) -> NoReturn:
    value = shown(value)
    what = f"{parameter} is {value!r}" if what is None else what
    raise InvalidParameterError(f"{what}; it must be {limit}", parameter=parameter, value=value, limit=limit)
