"""What the engine sends, brought to whoever asked: tokens to text, samples to requests, requests to sinks.

Here: the table of live requests, and one pass over each message of the engine (:meth:`OutputProcessor.process`). Not here:
how a consumer waits (:class:`asyncllm.token_stream.TokenStream`), how messages arrive (:mod:`asyncllm.client`).

Used by one thread at a time: the loop's, or the caller's of a synchronous engine. Nothing here blocks or awaits.

Invariants:

* A request is in the table from :meth:`~OutputProcessor.add_request` until its sink got ``finish`` or ``fail``, or until
  :meth:`~OutputProcessor.abort`; each sink gets exactly one of these ends, and nothing after it.
* A failure of one request (its detokenizer, its sink) ends that request alone.
* Outputs for unknown ids are ignored: they are late ones of aborted requests.

How the end of a sample is reported: a stop token (end of sequence or one of ``stop_token_ids``) is in ``token_ids`` and counts
in ``usage``, its text is not in the text unless ``include_stop_str_in_output``. The token that completes a stop string
is in ``token_ids`` likewise, the text is cut before the match (after it, if included). ``stop_reason`` is the stop
string, the id out of ``stop_token_ids``, or ``None`` for end of sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncllm.errors import AsyncLLMError, DuplicateRequestError, ErrorInfo, RequestFailedError
from asyncllm.frontend.detokenizer import Detokenizer, IdsOnly, make_decoder, make_detokenizer
from asyncllm.frontend.logprobs import LogprobQueue, PromptLogprobs
from asyncllm.outputs import Completion, FinishReason, TokenDelta, TokenLogprobs, Usage
from asyncllm.wire.messages import EngineFinishReason

if TYPE_CHECKING:
    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.frontend.tokenizer import Tokenizer
    from asyncllm.wire.messages import EngineCoreOutputs, FinishedRequest

__all__ = ["OutputProcessor", "RequestState", "SampleState", "Sink"]

logger = logging.getLogger(__name__)

REASONS = {
    EngineFinishReason.STOP: FinishReason.STOP,
    EngineFinishReason.LENGTH: FinishReason.LENGTH,
    EngineFinishReason.ABORT: FinishReason.ABORT,
}


class Sink(Protocol):
    """Where the items of one request go. Called by the thread that calls the processor; must not block."""

    def put(self, delta: TokenDelta) -> None:
        """Take the next item of the sample ``delta.index``."""
        ...

    def finish(self, completion: Completion) -> None:
        """All samples have ended; nothing follows. ``completion.usage`` is the request's."""
        ...

    def fail(self, error: BaseException) -> None:
        """The request has failed; nothing follows. What was received before has been put."""
        ...


class SampleState:
    """One sample of a request, which is one request to the engine."""

    __slots__ = (
        "_put",
        "_queue",
        "detokenizer",
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

    def __init__(self, request: RequestState, index: int, engine_id: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.engine_id = engine_id
        self.token_ids: list[int] = []
        """Every id the engine has sent, delivered or held."""
        self.texts: list[str] = []
        self.num_delivered = 0
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer: Detokenizer | IdsOnly = make_detokenizer(
            tokenizer,
            detokenize=params.detokenize,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._queue = None if params.logprobs is None else LogprobQueue()
        self._put = request.sink.put

    def queue_logprobs(self, outputs: EngineCoreOutputs) -> None:
        """Take the logprobs of the tokens that follow."""
        if self._queue is not None:
            self._queue.add(outputs.logprobs[self.engine_id])

    def push(self, token_id: int) -> None:
        """Take the next token and deliver what can go out; ``detokenizer.matched`` is set if a stop string is complete."""
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
        return Completion(
            request_id=request.request_id,
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            prompt_token_ids=request.prompt_token_ids,
            finish_reason=self.finish_reason or FinishReason.ABORT,
            stop_reason=self.stop_reason,
            usage=usage,
            logprobs=self.logprobs,
            prompt_logprobs=None if request.prompt_logprobs is None else request.prompt_logprobs.values,
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
    )

    def __init__(self, processed: ProcessedRequest, sink: Sink, tokenizer: Tokenizer) -> None:
        self.processed = processed
        self.request_id = processed.request_id
        self.params = processed.params
        self.prompt_token_ids = processed.prompt_token_ids
        self.sink = sink
        self.first_token_at: float | None = None
        self.prompt_logprobs = self._make_prompt_logprobs(tokenizer)
        self.samples = [
            SampleState(self, index, request.request_id, tokenizer) for index, request in enumerate(processed.requests)
        ]
        self.num_live = len(self.samples)

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

    def usage(self, now: float) -> Usage:
        """Return what the request has cost up to ``now``."""
        start = self.processed.submitted_at
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(len(sample.token_ids) for sample in self.samples),
            # Samples after the first find the prompt of the first in the cache; the request as a whole did not.
            cached_tokens=min(sample.num_cached_tokens for sample in self.samples),
            num_preemptions=sum(sample.num_preemptions for sample in self.samples),
            time_to_first_token_s=None if self.first_token_at is None else self.first_token_at - start,
            total_time_s=now - start,
        )

    def completion(self, now: float) -> Completion:
        """Return the first sample, with all of them in ``samples``."""
        usage = self.usage(now)
        samples = [sample.completion(usage) for sample in self.samples]
        return msgspec.structs.replace(samples[0], samples=samples)


class OutputProcessor:
    """The table of live requests and the way from engine outputs to their sinks."""

    def __init__(self, tokenizer: Tokenizer, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[int, SampleState] = {}

    @property
    def num_unfinished(self) -> int:
        """Return the number of live requests."""
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Return the ids of live requests, oldest first."""
        return list(self._requests)

    def get(self, request_id: str) -> RequestState | None:
        """Return the live request ``request_id``, ``None`` if there is none."""
        return self._requests.get(request_id)

    def add_request(self, processed: ProcessedRequest, sink: Sink) -> RequestState:
        """Register a request; call before it is sent. If sending fails, :meth:`abort` it with ``deliver=False``.

        :raises DuplicateRequestError: a live request has its id.
        """
        request_id = processed.request_id
        if request_id in self._requests:
            raise DuplicateRequestError(
                f"a request with the id {request_id!r} is still running",
                parameter="request_id",
                value=request_id,
                request_id=request_id,
            )
        request = RequestState(processed, sink, self._tokenizer)
        self._requests[request_id] = request
        for sample in request.samples:
            self._samples[sample.engine_id] = sample
        return request

    # ------------------------------------------------------------------------------------------------ hot path
    def process(self, outputs: EngineCoreOutputs) -> list[int]:
        """Deliver the tokens of one step; return ids that the engine has to abort (stop string found, or failed here)."""
        aborts: list[int] = []
        now = self._clock()
        self._take_columns(outputs)
        last_tokens: dict[int, list[int]] = {row.request_id: [] for row in outputs.finished}
        get = self._samples.get
        for engine_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            sample = get(engine_id)
            if sample is None:
                continue
            if last_tokens and engine_id in last_tokens:
                last_tokens[engine_id].append(token_id)
                continue
            if not sample.token_ids and sample.request.first_token_at is None:
                sample.request.first_token_at = now
            try:
                sample.push(token_id)
                if sample.detokenizer.matched is not None:
                    aborts.append(engine_id)
                    self._end(sample, FinishReason.STOP, None, now)
            except Exception as error:
                aborts += self._fail_request(sample.request, error)
        for row in outputs.finished:
            aborts += self._finish(row, last_tokens[row.request_id], now)
        return aborts

    def _take_columns(self, outputs: EngineCoreOutputs) -> None:
        for engine_id, num_cached_tokens in outputs.num_cached_tokens.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.num_cached_tokens = num_cached_tokens
        for engine_id in outputs.logprobs:
            if (sample := self._samples.get(engine_id)) is not None:
                sample.queue_logprobs(outputs)
        for engine_id, rows in outputs.prompt_logprobs.items():
            sample = self._samples.get(engine_id)
            if sample is not None and sample.request.prompt_logprobs is not None:
                sample.request.prompt_logprobs.add(rows)

    def _finish(self, row: FinishedRequest, token_ids: list[int], now: float) -> list[int]:
        """End the sample that ``row`` names; its last tokens come here so that the very last carries the reason."""
        sample = self._samples.get(row.request_id)
        if sample is None:
            return []
        try:
            self._finish_sample(sample, row, token_ids, now)
        except Exception as error:
            sample.finish_reason = sample.finish_reason or FinishReason.ERROR  # the engine is done with it
            return self._fail_request(sample.request, error)
        if row.reason == EngineFinishReason.ERROR:
            info = row.error or ErrorInfo("RequestFailedError", "the engine gave no reason")
            return self._fail_request(sample.request, AsyncLLMError.from_info(info, RequestFailedError))
        return []

    def _finish_sample(self, sample: SampleState, row: FinishedRequest, token_ids: list[int], now: float) -> None:
        sample.num_cached_tokens = row.num_cached_tokens
        sample.num_preemptions = row.num_preemptions
        request = sample.request
        if token_ids and request.first_token_at is None:
            request.first_token_at = now
        for token_id in token_ids[:-1]:
            sample.push(token_id)
            if sample.detokenizer.matched is not None:
                self._end(sample, FinishReason.STOP, None, now)
                return
        piece: tuple[str, list[int]] = ("", [])
        if token_ids:
            silent = row.reason == EngineFinishReason.STOP and not request.params.include_stop_str_in_output
            piece = sample.push_last(token_ids[-1], silent=silent)
        if row.reason == EngineFinishReason.ERROR:
            sample.end(FinishReason.ERROR, None, piece)
        else:
            self._end(sample, REASONS[EngineFinishReason(row.reason)], row.stop_token_id, now, piece)

    def _end(
        self,
        sample: SampleState,
        reason: FinishReason,
        stop_reason: int | str | None,
        now: float,
        piece: tuple[str, list[int]] = ("", []),
    ) -> None:
        """End one sample, and with the last one its request."""
        request = sample.request
        self._samples.pop(sample.engine_id, None)
        request.num_live -= 1
        is_last = request.num_live == 0
        if is_last:
            self._forget(request)
        sample.end(reason, stop_reason, piece)
        if is_last:
            request.sink.finish(request.completion(now))

    # ------------------------------------------------------------------------------------------- ends from outside
    def abort(self, request: RequestState | str, deliver: bool = True) -> list[int]:
        """Drop a request; return the engine's ids to abort (none for an unknown or ended request).

        ``deliver``: what is held goes out with ``finish_reason`` ABORT, and the sink gets the partial completion; else
        the sink gets nothing at all. Pass the :class:`RequestState` where a newer request may have the same id.
        """
        state = self._live(request)
        if state is None:
            return []
        engine_ids = state.live_engine_ids
        self._forget(state)
        if deliver:
            try:
                for sample in state.samples:
                    if sample.finish_reason is None:
                        sample.end(FinishReason.ABORT)
                state.sink.finish(state.completion(self._clock()))
            except Exception as error:
                self._fail_sink(state, error)
        return engine_ids

    def fail(self, request: RequestState | str, error: BaseException) -> list[int]:
        """End a request with ``error`` after what is held; return the engine's ids to abort."""
        state = self._live(request)
        return [] if state is None else self._fail_request(state, error)

    def fail_all(self, error: BaseException) -> None:
        """End every live request with ``error`` (the engine died); each gets an exception object of its own."""
        for state in list(self._requests.values()):
            self._fail_request(state, _own_copy(error))

    def _live(self, request: RequestState | str) -> RequestState | None:
        if isinstance(request, str):
            return self._requests.get(request)
        return request if self._requests.get(request.request_id) is request else None

    def _forget(self, request: RequestState) -> None:
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        for sample in request.samples:
            self._samples.pop(sample.engine_id, None)

    def _fail_request(self, request: RequestState, error: BaseException) -> list[int]:
        engine_ids = request.live_engine_ids
        self._forget(request)
        live: Iterable[SampleState] = [sample for sample in request.samples if sample.finish_reason is None]
        try:
            for sample in live:
                sample.deliver_held()
        except Exception as second:  # whatever broke the request breaks this too
            logger.debug("request %r: held text is lost: %r", request.request_id, second)
        self._fail_sink(request, error)
        return engine_ids

    def _fail_sink(self, request: RequestState, error: BaseException) -> None:
        if not isinstance(error, AsyncLLMError):
            failed = RequestFailedError(
                f"delivering the output of request {request.request_id!r} failed: {error!r}",
                request_id=request.request_id,
            )
            failed.__cause__ = error
            error = failed
        try:
            request.sink.fail(error)
        except Exception:
            logger.exception("the sink of request %r failed", request.request_id)


def _own_copy(error: BaseException) -> BaseException:
    """Return an equal exception: one object raised in a thousand tasks would collect all their tracebacks."""
    if not isinstance(error, AsyncLLMError):
        return error
    copy = type(error)(error.message, **{name: getattr(error, name) for name in error.fields})
    copy.__cause__ = error.__cause__
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy
