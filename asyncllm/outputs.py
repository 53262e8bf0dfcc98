"""What a user gets back: the items of a stream, the finished completion, and how many tokens it cost.

Plain data; nothing here knows of the engine. Invariant (DESIGN contract): over the items of one sample, the joined
``text`` equals one-shot decoding of the ids, and the concatenated ``token_ids`` are the generated ids, each once.
"""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Completion", "FinishReason", "Logprob", "TokenDelta", "TokenLogprobs", "Usage"]


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """End of sequence, a stop string or a stop token; ``stop_reason`` says which (``None``: end of sequence)."""
    LENGTH = "length"
    """``max_tokens`` or the model's context (or, alone in the engine, its KV blocks) is used up."""
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


class TokenDelta(msgspec.Struct, gc=False):
    """One item of a stream: usually one token. ``str(delta)`` is its text.

    ``text`` is empty only on the last item of a sample, which carries ``finish_reason``. An item holds several
    ``token_ids`` where text had to be held back (an incomplete character, a possible stop string).
    """

    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __str__(self) -> str:
        return self.text


class Completion(msgspec.Struct):
    """A finished sample of a request. ``str(completion)`` is its text; with n > 1 the others are in ``samples``.

    ``samples`` holds all n samples in index order (this one included); ``usage`` is that of the whole request.
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

    def __str__(self) -> str:
        return self.text
