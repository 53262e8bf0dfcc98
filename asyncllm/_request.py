"""What the facades share on the way of a request: their arguments, and how a prompt becomes engine requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError, InvalidParameterError
from asyncllm.frontend.chat import ChatOptions
from asyncllm.sampling_params import RepetitionDetectionParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm._session import Session
    from asyncllm.frontend.input_processor import InputProcessor, ProcessedRequest
    from asyncllm.token_stream import StreamInbox, StreamOwner, TokenStream

__all__ = [
    "BranchOptions",
    "ChatOptions",
    "ChatRequest",
    "Message",
    "PromptRequest",
    "RequestPath",
    "SamplingOptions",
    "make_config",
    "make_params",
]

Message = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``; what else it may hold depends on the model's chat template."""


class BranchOptions(TypedDict, total=False):
    """The fields of :class:`asyncllm.SamplingParams` as keywords, but for ``n``."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    repetition_detection: RepetitionDetectionParams | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: list[int] | None
    schema: Any
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool
    truncate_prompt_tokens: int | None
    prompt_lookup_num_tokens: int | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


class SamplingOptions(BranchOptions, total=False):
    """The fields of :class:`asyncllm.SamplingParams` as keywords."""

    n: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    prefix_id: int = 0
    """The engine's id of a request or pin whose blocks this shares as far as both begin with the same tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest(_Request):
    """A request whose prompt is a text or token ids."""

    prompt: str | Sequence[int]
    num_after: int = 0
    """So many ids at the end of the prompt are output that was delivered: the text goes on after them."""

    def is_long(self, inputs: InputProcessor) -> bool:
        """Return whether :meth:`process` takes so long that an event loop should leave it to a thread."""
        truncates = self.params.truncate_prompt_tokens is not None
        return inputs.is_long(self.prompt, truncates=truncates) or inputs.has_long_params(self.params)

    def process(self, inputs: InputProcessor, request_id: str | None) -> ProcessedRequest:
        """Return the engine requests.

        :raises RequestError: something is wrong with the request.
        """
        return inputs.process(
            self.prompt,
            self.params,
            request_id=request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            prefix_id=self.prefix_id,
            num_after=self.num_after,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest(_Request):
    """A request whose prompt is made of messages by the model's chat template."""

    messages: Sequence[Message]
    options: ChatOptions = field(default_factory=ChatOptions)

    def is_long(self, inputs: InputProcessor) -> bool:
        """Return whether :meth:`process` takes so long that an event loop should leave it to a thread."""
        return (
            inputs.is_long_chat((self.messages, self.options.tools))
            or inputs.has_long_params(self.params)
            or not inputs.chat.is_ready(self.options)
        )

    def process(self, inputs: InputProcessor, request_id: str | None) -> ProcessedRequest:
        """Return the engine requests.

        :raises RequestError: something is wrong with the request, or the template refuses the messages.
        :raises UnsupportedModelError: the model's template is not valid jinja.
        """
        prompt = inputs.chat.make_prompt(self.messages, self.options)
        return inputs.process(
            prompt.text,
            self.params,
            request_id=request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            add_special_tokens=False,
            prefix_id=self.prefix_id,
            output=prompt.output,
        )


class RequestPath:
    """The async facade's way of a request, as bound methods, for those who make requests in its name."""

    def __init__(
        self,
        owner: StreamOwner,
        *,
        started: Callable[[], Awaitable[Session]],
        claim: Callable[[str | None, int, Callable[[str, int, int], StreamInbox]], StreamInbox],
        open_stream: Callable[[PromptRequest | ChatRequest, str | None], TokenStream],
        admit: Callable[[PromptRequest | ChatRequest, StreamInbox], Awaitable[None]],
    ) -> None:
        self.owner = owner
        self.started = started
        self.claim = claim
        self.open_stream = open_stream
        self.admit = admit


def make_params(params: SamplingParams | None, options: SamplingOptions) -> SamplingParams:
    """Return the parameters that a caller gave, as an object or as keywords.

    :raises InvalidParameterError: a keyword is out of range.
    :raises UnknownParameterError: a keyword is none of them.
    :raises TypeError: both forms were used.
    """
    if params is None:
        return SamplingParams(**options)
    if options:
        raise TypeError(f"give params or the keywords {sorted(options)}, not both")
    if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidParameterError(
            f"params is a {type(params).__name__}; it must be SamplingParams", parameter="params"
        )
    return params


def make_config(model: str | os.PathLike[str] | EngineConfig, options: dict[str, Any]) -> EngineConfig:
    """Return the configuration that a facade was made with.

    :raises ConfigError: an option is unknown, out of range, or given beside an :class:`EngineConfig`.
    """
    if isinstance(model, EngineConfig):
        if options:
            raise ConfigError(f"an EngineConfig leaves no room for the options {sorted(options)}")
        return model
    return EngineConfig.from_options(os.fspath(model), **options)
