"""What a user gets back: the items of a stream, the finished completion, and how many tokens it cost.

Plain data; nothing here knows of the engine. Invariant (DESIGN contract): over the items of one sample, the joined
``text`` equals one-shot decoding of the ids, and the concatenated ``token_ids`` are the generated ids, each once. That
holds over all channels together, the markers between them included: a parser labels text and never drops any.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

__all__ = [
    "Channel",
    "Completion",
    "FinishReason",
    "InvalidToolCall",
    "Logprob",
    "TokenDelta",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]


class Channel(enum.StrEnum):
    """What a piece of the output is for."""

    CONTENT = "content"
    """The answer; all text of a request without a parser."""
    REASONING = "reasoning"
    """What the model thinks before it answers."""
    TOOL_CALL = "tool_call"
    """The text of a tool call, as the model wrote it."""
    MARKUP = "markup"
    """Markers such as ``<think>`` or ``<tool_call>`` with the line breaks next to them; not meant to be read."""


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """End of sequence, a stop string or a stop token; ``stop_reason`` says which (``None``: end of sequence)."""
    TOOL_CALLS = "tool_calls"
    """As ``STOP``, where the model called at least one tool and the call could be read."""
    LENGTH = "length"
    """``max_tokens`` or the model's context (or, alone in the engine, its KV blocks) is used up. An output under a
    grammar was brought to its end before, wherever there was room for one: its text is whole."""
    REPETITION = "repetition"
    """The output ends in a pattern as ``repetition_detection`` says; ``stop_reason`` is "repetition_detected"."""
    ABORT = "abort"
    """The caller ended it: ``cancel()``, ``abort()``, ``finish()`` or shutdown."""
    ERROR = "error"
    """The engine failed on this request alone."""


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One candidate token: natural log of its probability, its rank (1 = most likely) and its text."""

    token_id: int
    logprob: float
    rank: int
    text: str | None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The candidates at one position: the chosen (or prompt) token, then the most likely ones in order.

    ``requested`` are those of ``logprob_token_ids``, in the order in which they were asked for.
    """

    chosen: Logprob
    top: list[Logprob]
    requested: list[Logprob] = []


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a request cost. Of one that was cancelled or failed: what was known here at that moment.

    Times are durations in seconds, by two clocks: ``time_to_first_token_s`` and ``total_time_s`` by the caller's, from
    submission (before a text was tokenized); ``queue_time_s`` and ``prefill_time_s`` by the engine's. So the former
    hold the latter and what lies between the two processes.
    """

    prompt_tokens: int
    """Tokens of the prompt, counted once also for n > 1."""
    completion_tokens: int
    """Tokens that were generated, summed over samples; those that a cancelled stream did not deliver are among them."""
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache instead of being computed."""
    num_preemptions: int = 0
    """How often its blocks were taken away and computed again later, summed over samples."""
    time_to_first_token_s: float | None = None
    """From submission until the first token (of any sample) was here; ``None``: there was none."""
    total_time_s: float | None = None
    """From submission to the end; ``None``: it was never sent."""
    queue_time_s: float | None = None
    """From arrival at the engine until the first step that took it in was made; ``None``: not known, see below."""
    prefill_time_s: float | None = None
    """From there until the first token was sampled, other requests' share of these steps included.

    The engine tells both times with the first token, those of the sample that got it first with n > 1. So both are
    ``None`` where there was no token yet; where the engine itself ended such a request, the queue time is told.
    """
    accepted_draft_tokens: int = 0
    """Of ``completion_tokens``, those that were proposed ahead and confirmed by the model; 0 without
    ``prompt_lookup_num_tokens``."""
    proposed_draft_tokens: int = 0
    """Tokens that were proposed ahead, right or wrong."""

    @property
    def total_tokens(self) -> int:
        """Return prompt plus completion tokens."""
        return self.prompt_tokens + self.completion_tokens


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model wants made."""

    id: str
    """Made here (nine letters and digits, which every chat template takes) unless the model wrote one."""
    name: str
    """As the model wrote it; it need not be one of the request's tools."""
    arguments: dict[str, Any]
    text: str = ""
    """The arguments as the model wrote them: JSON."""


class InvalidToolCall(msgspec.Struct, frozen=True):
    """A call that cannot be read: broken JSON, no name, arguments that are no object, or an output that ended in it."""

    id: str
    name: str | None
    text: str
    """The whole call as the model wrote it."""
    error: str
    """What is wrong with it, fit to be shown to the model."""


class ToolCallDelta(msgspec.Struct, gc=False):
    """What one item adds to a tool call: its name, then pieces of its arguments, then the whole.

    The joined ``arguments`` of one ``index`` are the text of its arguments. The last item has ``call`` or ``invalid``.
    """

    index: int
    """Which call of this sample, from 0."""
    id: str
    name: str | None = None
    arguments: str = ""
    call: ToolCall | None = None
    invalid: InvalidToolCall | None = None


class TokenDelta(msgspec.Struct, gc=False):
    """One item of a stream: usually one token. ``str(delta)`` is its text.

    ``text`` is empty only on the last item of a sample, which carries ``finish_reason``. An item holds several
    ``token_ids`` where text had to be held back (an incomplete character, a possible stop string or marker). Where one
    token's text belongs to several channels, each part is an item, and the first of them has the id.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    channel: Channel = Channel.CONTENT
    tool_call: ToolCallDelta | None = None

    @property
    def content(self) -> str:
        """The text if it is part of the answer, else the empty string."""
        return self.text if self.channel is Channel.CONTENT else ""

    @property
    def reasoning(self) -> str:
        """The text if it is reasoning, else the empty string."""
        return self.text if self.channel is Channel.REASONING else ""

    def __str__(self) -> str:
        return self.text


class Completion(msgspec.Struct):
    """A finished sample of a request. ``str(completion)`` is its text; with n > 1 the others are in ``samples``.

    ``samples`` holds all n samples in index order (this one included); ``usage`` is that of the whole request.
    ``text`` is everything the model wrote. ``content``, ``reasoning`` and the tool calls are the parts of it, without
    the markers between them; where no parser was at work, ``content`` is ``text``.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    samples: list[Completion] = []
    content: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []
    invalid_tool_calls: list[InvalidToolCall] = []
    parsed: Any = None
    """What the text says as JSON, where ``schema`` or ``json_object`` was asked for: an object of the type given, plain
    data for a schema that was a dict or text."""
    parse_error: str | None = None
    """Why there is no ``parsed`` although it was asked for: the text was cut off, or the type refuses it."""

    def __str__(self) -> str:
        return self.text

    def to_message(self) -> dict[str, Any]:
        """Return the sample as the assistant's message for the next turn of a chat, in OpenAI's and templates' form.

        Arguments are objects, as templates take them. A call that could not be read is part of the content, as the
        model wrote it, so that the model sees its own mistake.
        """
        content = "".join([self.content, *(call.text for call in self.invalid_tool_calls)])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
