"""Whether a request's newest token is its last: stop tokens, its length, repetition, the end of its grammar.

Stop strings are not here: the front end finds them in the text. Pure, but for a matcher that follows the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncllm.errors import AsyncLLMError, ErrorInfo
from asyncllm.wire.messages import EngineFinishReason

if TYPE_CHECKING:
    from collections.abc import Container

    from asyncllm.core.request import Request
    from asyncllm.structured.matcher import Matcher

__all__ = ["End", "describe", "end_of"]


class End(NamedTuple):
    """Why a request ends; ``stop_id`` is the stop token, unless that is the model's own end of sequence."""

    reason: EngineFinishReason
    stop_id: int | None = None
    error: ErrorInfo | None = None


def end_of(request: Request, token_id: int, eos_token_ids: Container[int]) -> End | None:
    """Return the end that ``token_id``, the newest of ``request``, brings; ``None``: it goes on.

    Nothing but its length and its grammar end a request before ``min_tokens``.
    """
    sampling, watch = request.sampling, request.repetition
    repeats = watch is not None and watch.repeats(request.token_ids)
    if request.matcher is not None and (end := _end_of_grammar(request, request.matcher, token_id, eos_token_ids)):
        return end
    if token_id in request.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        return End(EngineFinishReason.STOP, None if is_eos else token_id)
    if len(request.token_ids) >= request.max_num_tokens:
        return End(EngineFinishReason.LENGTH)
    if repeats and request.num_output_tokens >= sampling.min_tokens:
        return End(EngineFinishReason.REPETITION)
    return None


def _end_of_grammar(request: Request, matcher: Matcher, token_id: int, eos_token_ids: Container[int]) -> End | None:
    """Follow the newest token in the grammar; an end if nothing may come after it, whatever ``min_tokens``.

    A stop token ends the request by itself and is not followed.
    """
    if token_id in request.stop_token_ids:
        return None
    if token_id in eos_token_ids:  # though the caller ignores it: nothing else may come
        return End(EngineFinishReason.STOP)
    try:
        if not matcher.follow(token_id, request.max_num_tokens - len(request.token_ids)):
            return None
    except AsyncLLMError as error:
        return End(EngineFinishReason.ERROR, error=describe(error))
    return End(EngineFinishReason.LENGTH if matcher.is_shortened else EngineFinishReason.COMPLETE)


def describe(error: AsyncLLMError) -> ErrorInfo:
    """Return an error that was never raised as plain data (there is no traceback to tell of)."""
    return ErrorInfo(type(error).__name__, error.message, {name: getattr(error, name) for name in error.fields})
