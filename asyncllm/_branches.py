"""Where a branch leaves its source, and with which parameters and seeds: decided here, sent by the facade.

The branch point is the last token that a stream has yielded, or the end of a completion. What a stream holds back (an
unfinished character, a possible stop string) and what its reader has not taken yet come after it. So the text of the
source up to there and the text of a branch are together the one-shot decoding of all ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncllm._request import PromptRequest, make_params
from asyncllm.errors import InvalidParameterError, UsageError, shown
from asyncllm.outputs import Completion
from asyncllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from asyncllm._request import BranchOptions
    from asyncllm.token_stream import TokenStream

__all__ = ["branch_requests"]

NUM_SEEDS = 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPoint:
    """Prompt and output up to the branch, and what a branch takes over from its source."""

    token_ids: list[int]
    num_output_tokens: int
    params: SamplingParams
    index: int
    engine_id: int = 0
    priority: int = 0
    cache_salt: str | None = None


def branch_requests(
    source: TokenStream | Completion,
    n: int | None,
    params: SamplingParams | Sequence[SamplingParams] | None,
    sampling: BranchOptions,
    *,
    index: int,
    cache_salt: str | None,
) -> list[PromptRequest]:
    """Return the requests of the branches.

    :raises UsageError: the source is a stream that was not sent yet.
    :raises InvalidParameterError: an argument is out of range.
    """
    is_ended = isinstance(source, Completion)
    point = _end_of(source, cache_salt) if is_ended else _present_token(source, index, cache_salt)
    return [
        PromptRequest(
            prompt=point.token_ids,
            num_after=point.num_output_tokens,
            params=given,
            priority=point.priority,
            cache_salt=point.cache_salt,
            prefix_id=point.engine_id,
        )
        for given in _params_of(point, n, params, sampling)
    ]


def _end_of(done: Completion, cache_salt: str | None) -> BranchPoint:
    return BranchPoint(
        token_ids=[*done.prompt_token_ids, *done.token_ids],
        num_output_tokens=len(done.token_ids),
        params=SamplingParams(),
        index=done.index,
        cache_salt=cache_salt,
    )


def _present_token(stream: TokenStream, index: int, cache_salt: str | None) -> BranchPoint:
    inbox = stream.inbox
    request = inbox.request
    if request is None:
        raise UsageError(f"stream {stream.request_id!r} was not sent yet; read from it before it is forked")
    if not 0 <= index < len(request.samples):
        limit = len(request.samples) - 1
        raise InvalidParameterError(
            f"index is {index!r}; the stream has samples 0 … {limit}",
            parameter="index",
            value=shown(index),
            limit=limit,
        )
    output, sent = inbox.yielded_ids(index), request.processed.requests[index]
    return BranchPoint(
        token_ids=[*request.prompt_token_ids, *output],
        num_output_tokens=len(request.processed.after) + len(output),
        params=_inherited(request.params),
        index=index,
        engine_id=sent.request_id,
        priority=sent.priority,
        cache_salt=sent.cache_salt if cache_salt is None else cache_salt,
    )


def _inherited(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a source without what is about its prompt or several samples."""
    return msgspec.structs.replace(params, n=1, prompt_logprobs=None, truncate_prompt_tokens=None)


def _params_of(
    point: BranchPoint, n: int | None, params: SamplingParams | Sequence[SamplingParams] | None, sampling: Any
) -> list[SamplingParams]:
    """Return the parameters of each branch; of one set for all, the seeds are told apart."""
    if isinstance(params, Sequence):
        if sampling:
            raise TypeError(f"give params or the keywords {sorted(sampling)}, not both")
        if n is not None and n != len(params):
            raise InvalidParameterError(
                f"params has {len(params)} entries for {n} branches", parameter="params", value=len(params), limit=n
            )
        return [make_params(one, {}) for one in params]
    count = 1 if n is None else n
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidParameterError(f"n is {shown(n)!r}; it must be at least 1", parameter="n", value=shown(n), limit=1)
    if params is not None:
        base, is_new = make_params(params, sampling), True
    else:
        known = {name: getattr(point.params, name) for name in SamplingParams.__struct_fields__}
        base, is_new = SamplingParams(**{**known, **cast("dict[str, Any]", sampling)}), "seed" in sampling
        _refuse_inherited_structure(base, sampling)
    if base.seed is None:
        return [base] * count
    if is_new:
        return [_with_seed(base, (base.seed + number) % NUM_SEEDS) for number in range(count)]
    return [_with_seed(base, _derived_seed(base.seed, point, number)) for number in range(count)]


def _refuse_inherited_structure(params: SamplingParams, given: Any) -> None:
    name = params.structure
    if name is not None and name not in given:
        raise InvalidParameterError(
            f"the stream has a {name}; a branch in the middle of structured output must have {name}=None, or its own",
            parameter=name,
        )


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return msgspec.structs.replace(params, seed=seed)


def _derived_seed(seed: int, point: BranchPoint, number: int) -> int:
    """Return a seed that is the same in each run, and whose draws are not those of the source over again."""
    name = f"{seed}/{point.index}/{len(point.token_ids)}/{number}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
