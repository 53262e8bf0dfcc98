"""What the engine sends, brought to whoever asked: tokens to text, samples to requests, requests to sinks.

Here: the table of live requests, and one pass over each message of the engine (:meth:`OutputProcessor.process`). Not
here: how a consumer waits (:class:`asyncllm.token_stream.TokenStream`), how messages arrive (:mod:`asyncllm.client`).

Used by one thread at a time: the loop's, or the caller's of a synchronous engine. Nothing here blocks or awaits.

Invariants:

* A request is in the table from :meth:`~OutputProcessor.add_request` until its sink got ``finish`` or ``fail``, or
  until :meth:`~OutputProcessor.abort`; each sink gets exactly one of these ends, and nothing after it.
* A failure of one request (its detokenizer, its sink) ends that request alone.
* Outputs for unknown ids are ignored: they are late ones of aborted requests.

How the end of a sample is reported: a stop token (end of sequence or one of ``stop_token_ids``) is in ``token_ids``
and counts in ``usage``, its text is not in the text unless ``include_stop_str_in_output``. The token that completes a
stop string is in ``token_ids`` likewise, the text is cut before the match (after it, if included). ``stop_reason`` is
the stop string, the id out of ``stop_token_ids``, or ``None`` for end of sequence and for the end of a grammar, whose
last token has its text. A repetition ends a sample with all
of its tokens and their text.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from asyncllm.errors import AsyncLLMError, DuplicateRequestError, ErrorInfo, RequestFailedError
from asyncllm.frontend.request_state import RequestState, SampleState, Sink
from asyncllm.outputs import FinishReason
from asyncllm.wire.messages import EngineFinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.frontend.tokenizer import Tokenizer
    from asyncllm.wire.messages import EngineCoreOutputs, FinishedRequest

__all__ = ["OutputProcessor", "RequestState", "SampleState", "Sink"]

logger = logging.getLogger(__name__)

REASONS = {
    EngineFinishReason.STOP: FinishReason.STOP,
    EngineFinishReason.LENGTH: FinishReason.LENGTH,
    EngineFinishReason.ABORT: FinishReason.ABORT,
    EngineFinishReason.REPETITION: FinishReason.REPETITION,
    EngineFinishReason.COMPLETE: FinishReason.STOP,
}
REPETITION_DETECTED = "repetition_detected"


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
        """Deliver the tokens of one step; return ids that the engine has to abort (stop string met, or failed here)."""
        now = self._clock()
        aborts = self._take_columns(outputs)
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
                aborts += self._fail_request(sample.request, _broken(sample.request, error))
        for row in outputs.finished:
            aborts += self._finish(row, last_tokens[row.request_id], now)
        return aborts

    def _take_columns(self, outputs: EngineCoreOutputs) -> list[int]:
        """Take what goes with the tokens; return the engine's ids of requests that failed on it."""
        aborts: list[int] = []
        for engine_id, num_cached_tokens in outputs.num_cached_tokens.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.num_cached_tokens = num_cached_tokens
        for engine_id, num_preemptions in outputs.num_preemptions.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.num_preemptions = num_preemptions
        for engine_id, drafts in outputs.drafts.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.drafts = drafts
        for engine_id, times in outputs.timings.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.request.add_times(times)
        for engine_id, rows in outputs.logprobs.items():
            if (sample := self._samples.get(engine_id)) is not None:
                sample.queue_logprobs(rows)
        for engine_id, rows in outputs.prompt_logprobs.items():
            sample = self._samples.get(engine_id)
            if sample is None or sample.request.prompt_logprobs is None:
                continue
            try:
                sample.request.prompt_logprobs.add(rows)
            except Exception as error:
                aborts += self._fail_request(sample.request, _broken(sample.request, error))
        return aborts

    def _finish(self, row: FinishedRequest, token_ids: list[int], now: float) -> list[int]:
        """End the sample that ``row`` names; its last tokens come here so that the very last carries the reason."""
        sample = self._samples.get(row.request_id)
        if sample is None:
            return []
        try:
            self._finish_sample(sample, row, token_ids, now)
        except Exception as error:
            sample.finish_reason = sample.finish_reason or FinishReason.ERROR  # the engine is done with it
            return self._fail_request(sample.request, _broken(sample.request, error))
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
            reason = REASONS[EngineFinishReason(row.reason)]
            stop_reason = REPETITION_DETECTED if reason is FinishReason.REPETITION else row.stop_token_id
            self._end(sample, reason, stop_reason, now, piece)

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
                self._fail_sink(state, _broken(state, error))
        return engine_ids

    def fail(self, request: RequestState | str, error: BaseException) -> list[int]:
        """End a request with ``error`` after what is held; return the engine's ids to abort."""
        state = self._live(request)
        return [] if state is None else self._fail_request(state, error)

    def fail_all(self, error: BaseException) -> None:
        """End every live request with ``error`` (the engine died); each gets an exception object of its own."""
        for state in list(self._requests.values()):
            self._fail_request(state, error.fresh() if isinstance(error, AsyncLLMError) else error)

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
        try:
            for sample in request.samples:
                if sample.finish_reason is None:
                    sample.deliver_held()
        except Exception as second:  # whatever broke the request breaks this too
            logger.debug("request %r: held text is lost: %r", request.request_id, second)
        self._fail_sink(request, error)
        return engine_ids

    def _fail_sink(self, request: RequestState, error: BaseException) -> None:
        try:
            request.sink.fail(error, request.usage(self._clock()))
        except Exception:
            logger.exception("the sink of request %r failed", request.request_id)


def _broken(request: RequestState, error: Exception) -> AsyncLLMError:
    """Return the error for a request whose detokenizer or sink raised ``error``."""
    if isinstance(error, AsyncLLMError):
        return error
    failed = RequestFailedError(
        f"delivering the output of request {request.request_id!r} failed: {error!r}", request_id=request.request_id
    )
    failed.__cause__ = error
    return failed
