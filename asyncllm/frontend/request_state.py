"""What the front end keeps of a live request and its samples; enough to resubmit the request to another engine.

A sample takes tokens and hands items to its request's sink. When samples and requests end is decided in
:mod:`asyncllm.frontend.output_processor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncllm.errors import RequestFailedError
from asyncllm.frontend.decoders import make_decoder
from asyncllm.frontend.detokenizer import make_detokenizer
from asyncllm.frontend.logprobs import LogprobQueue, PromptLogprobs
from asyncllm.frontend.structured import parse_output
from asyncllm.frontend.tokenizer import NO_IDS
from asyncllm.outputs import Completion, FinishReason, TokenDelta, TokenLogprobs, Usage

if TYPE_CHECKING:
    from asyncllm.frontend.detokenizer import Detokenizer, IdsOnly
    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.frontend.tokenizer import Tokenizer
    from asyncllm.wire.messages import LogprobRows, RequestTimes

__all__ = ["RequestState", "SampleState", "Sink"]


class Sink(Protocol):
    """Where the items of one request go. Called by the thread that calls the processor; must not block."""

    def put(self, delta: TokenDelta) -> None:
        """Take the next item of the sample ``delta.index``."""
        ...

    def finish(self, completion: Completion) -> None:
        """All samples have ended; nothing follows. ``completion.usage`` is the request's."""
        ...

    def fail(self, error: BaseException, usage: Usage) -> None:
        """Take the failure of the request and what it has cost; nothing follows. What came before has been put."""
        ...


class SampleState:
    """One sample of a request, which is one request to the engine."""

    __slots__ = (
        "_put",
        "_queue",
        "detokenizer",
        "drafts",
        "engine_id",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_delivered",
        "num_preemptions",
        "request",
        "stop_reason",
        "texts",
        "token_ids",
    )

    def __init__(
        self,
        request: RequestState,
        index: int,
        engine_id: int,
        tokenizer: Tokenizer,
        shown_ids: frozenset[int] = NO_IDS,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.engine_id = engine_id
        self.token_ids: list[int] = []
        """Every id the engine has sent, delivered or held."""
        self.texts: list[str] = []
        self.num_delivered = 0
        self.logprobs: list[TokenLogprobs] | None = [] if params.wants_logprobs else None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.drafts: tuple[int, int] = (0, 0)
        """Proposed and accepted ones."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: Detokenizer | IdsOnly = make_detokenizer(
            tokenizer,
            detokenize=params.detokenize,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            after=request.processed.after,
            shown_ids=shown_ids,
        )
        self._queue = LogprobQueue(len(params.logprob_token_ids or ())) if params.wants_logprobs else None
        self._put = request.sink.put

    @property
    def num_put(self) -> int:
        """Return the number of tokens that went to the sink."""
        return len(self.token_ids) - self.detokenizer.num_held

    def queue_logprobs(self, rows: LogprobRows) -> None:
        """Take the logprobs of the tokens that follow."""
        if self._queue is not None:
            self._queue.add(rows)

    def push(self, token_id: int) -> None:
        """Take the next token and deliver what can go out; ``detokenizer.matched`` tells of a complete stop string."""
        self.token_ids.append(token_id)
        if self._queue is not None:
            self._push_logprobs(self._queue)
        piece = self.detokenizer.push(token_id)
        if piece is not None:
            self._deliver(*piece)

    def push_last(self, token_id: int, *, silent: bool) -> tuple[str, list[int]]:
        """Take the last token without delivering it; return what goes out with the end of the sample."""
        self.token_ids.append(token_id)
        if self._queue is not None:
            self._push_logprobs(self._queue)
        detokenizer = self.detokenizer
        piece = detokenizer.push_silent(token_id) if silent else detokenizer.push(token_id)
        return piece or ("", [])

    def deliver_held(self) -> None:
        """Deliver what is held, if it has text; for requests that fail."""
        text, ids = self.detokenizer.close()
        if text:
            self._deliver(text, ids)

    def end(
        self, reason: FinishReason, stop_reason: int | str | None = None, piece: tuple[str, list[int]] = ("", [])
    ) -> None:
        """Deliver the last item: ``piece`` and all that is held, with the reason."""
        text, ids = self.detokenizer.close()
        if self.detokenizer.matched is not None and reason is not FinishReason.ERROR:
            reason, stop_reason = FinishReason.STOP, self.detokenizer.matched
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._deliver(piece[0] + text, [*piece[1], *ids], reason, stop_reason)

    def _deliver(
        self,
        text: str,
        ids: list[int],
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        self.texts.append(text)
        if self.logprobs is None:
            self._put(TokenDelta(text, ids, self.index, None, reason, stop_reason))
            return
        start = self.num_delivered
        self.num_delivered = start + len(ids)
        logprobs = self.logprobs[start : self.num_delivered]
        self._put(TokenDelta(text, ids, self.index, logprobs, reason, stop_reason))

    def _push_logprobs(self, queue: LogprobQueue) -> None:
        logprobs = queue.next(self.detokenizer.peek)
        if logprobs is None:
            raise RequestFailedError(
                f"the engine sent a token of request {self.request.request_id!r} without the logprobs asked for",
                request_id=self.request.request_id,
            )
        assert self.logprobs is not None
        self.logprobs.append(logprobs)

    def completion(self, usage: Usage) -> Completion:
        """Return the sample as it stands; one that has not ended is an aborted one."""
        request = self.request
        text = "".join(self.texts)
        parsed, parse_error = None, None
        if request.params.structure is not None:
            is_cut = self.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS)
            parsed, parse_error = parse_output(request.params, text, is_cut=is_cut)
        return Completion(
            request_id=request.request_id,
            index=self.index,
            text=text,
            content=text,
            token_ids=self.token_ids,
            prompt_token_ids=request.prompt_token_ids,
            finish_reason=self.finish_reason or FinishReason.ABORT,
            stop_reason=self.stop_reason,
            usage=usage,
            logprobs=self.logprobs,
            prompt_logprobs=None if request.prompt_logprobs is None else request.prompt_logprobs.values,
            parsed=parsed,
            parse_error=parse_error,
        )


class RequestState:
    """A live request: enough to resubmit it (prompt ids, parameters, and ``samples[i].token_ids``)."""

    __slots__ = (
        "first_token_at",
        "num_live",
        "params",
        "processed",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "samples",
        "sink",
        "times",
    )

    def __init__(self, processed: ProcessedRequest, sink: Sink, tokenizer: Tokenizer) -> None:
        self.processed = processed
        self.request_id = processed.request_id
        self.params = processed.params
        self.prompt_token_ids = processed.prompt_token_ids
        self.sink = sink
        self.first_token_at: float | None = None
        self.times: RequestTimes | None = None
        self.prompt_logprobs = self._make_prompt_logprobs(tokenizer)
        self.samples = [
            self._make_sample(index, request.request_id, tokenizer) for index, request in enumerate(processed.requests)
        ]
        self.num_live = len(self.samples)

    def _make_sample(self, index: int, engine_id: int, tokenizer: Tokenizer) -> SampleState:
        output = self.processed.output
        if output is None:
            return SampleState(self, index, engine_id, tokenizer)
        from asyncllm.frontend.parsed_sample import ParsedSampleState  # it is a SampleState, so it imports this module

        return ParsedSampleState(self, index, engine_id, tokenizer, output)

    def _make_prompt_logprobs(self, tokenizer: Tokenizer) -> PromptLogprobs | None:
        if self.params.prompt_logprobs is None:
            return None
        if not self.params.detokenize:
            return PromptLogprobs(self.prompt_token_ids, lambda _: None, lambda _: None)
        decoder = make_decoder(tokenizer, skip_special_tokens=False)
        return PromptLogprobs(self.prompt_token_ids, decoder.peek, decoder.push)

    @property
    def live_engine_ids(self) -> list[int]:
        """Return the engine's ids of the samples that have not ended."""
        return [sample.engine_id for sample in self.samples if sample.finish_reason is None]

    def add_times(self, times: RequestTimes) -> None:
        """Take the engine's times of a sample; those of the sample with the first token count."""
        if self.times is None or (self.times.prefill_s is None and times.prefill_s is not None):
            self.times = times

    def usage(self, now: float) -> Usage:
        """Return what the request has cost up to ``now``. Never fails, in any thread."""
        start, times = self.processed.submitted_at, self.times
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(len(sample.token_ids) for sample in self.samples),
            # Samples after the first find the prompt of the first in the cache; the request as a whole did not.
            cached_tokens=min(sample.num_cached_tokens for sample in self.samples),
            num_preemptions=sum(sample.num_preemptions for sample in self.samples),
            time_to_first_token_s=None if self.first_token_at is None else self.first_token_at - start,
            total_time_s=now - start,
            queue_time_s=None if times is None else times.queue_s,
            prefill_time_s=None if times is None else times.prefill_s,
            accepted_draft_tokens=sum(sample.drafts[1] for sample in self.samples),
            proposed_draft_tokens=sum(sample.drafts[0] for sample in self.samples),
        )

    def completion(self, now: float) -> Completion:
        """Return the first sample, with all of them in ``samples``."""
        usage = self.usage(now)
        samples = [sample.completion(usage) for sample in self.samples]
        return msgspec.structs.replace(samples[0], samples=samples)
