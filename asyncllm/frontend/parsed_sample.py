"""A sample whose text a parser cuts into channels before it is delivered.

Invariants, beside those of :class:`asyncllm.frontend.request_state.SampleState`:

* The text of one token is delivered together: a part of it that is certain waits for the rest of it. Where it belongs
  to several channels, each part is an item, one after the other, and the first of them has the id.
* The texts of all items joined are the text that the detokenizer made, whatever the parser found in it.
* Nothing is told twice: the joined text of the items in a channel is what the completion has for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from asyncllm.frontend.parsing.spans import Span
from asyncllm.frontend.request_state import SampleState
from asyncllm.outputs import Channel, Completion, FinishReason, InvalidToolCall, TokenDelta, ToolCall, Usage

if TYPE_CHECKING:
    from asyncllm.frontend.parsing.select import OutputFormat
    from asyncllm.frontend.request_state import RequestState
    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["ParsedSampleState"]


class ParsedSampleState(SampleState):
    """One sample of a chat request that has tools or reasoning."""

    __slots__ = ("_channel_to_texts", "_invalid_tool_calls", "_num_fed", "_num_put", "_parser", "_pieces", "_spans",
                 "_tool_calls")  # fmt: skip

    def __init__(
        self, request: RequestState, index: int, engine_id: int, tokenizer: Tokenizer, output: OutputFormat
    ) -> None:
        super().__init__(request, index, engine_id, tokenizer, output.shown_ids)
        self._parser = output.make_parser()
        self._pieces: deque[tuple[int, int, list[int]]] = deque()  # begin and end in the text, ids: not delivered
        self._spans: list[Span] = []  # certain, not delivered
        self._num_fed = 0  # characters
        self._num_put = 0
        self._channel_to_texts: dict[Channel, list[str]] = {Channel.CONTENT: [], Channel.REASONING: []}
        self._tool_calls: list[ToolCall] = []
        self._invalid_tool_calls: list[InvalidToolCall] = []

    @property
    def num_put(self) -> int:
        """Return the number of tokens that went to the sink."""
        return super().num_put - sum(len(ids) for _, _, ids in self._pieces)

    def _deliver(
        self,
        text: str,
        ids: list[int],
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        begin = self._num_fed
        self._num_fed += len(text)
        spans = self._parser.feed(text)
        if reason is None and not self._pieces and len(spans) == 1 and len(spans[0].text) == len(text):
            self._num_put = self._num_fed  # the usual case: nothing was held, and nothing is
            self._put_span(spans[0], ids)
            return
        self._pieces.append((begin, self._num_fed, ids))
        self._spans += spans
        if reason is None:
            self._put_spans(self._num_whole())
        else:
            self._put_last(reason, stop_reason)

    def deliver_held(self) -> None:
        """Deliver what is held, if it has text; for requests that fail."""
        super().deliver_held()
        self._spans += [span for span in self._parser.close() if span.text]
        self._put_spans(len(self._spans))

    def _num_whole(self) -> int:
        """Return how many of the spans can be delivered: up to the last one that ends where a piece ends."""
        if not self._spans:
            return 0
        ends = {end for _, end, _ in self._pieces}
        place, num_whole = self._num_put, 0
        for index, span in enumerate(self._spans):
            place += len(span.text)
            if place in ends:
                num_whole = index + 1
        return num_whole

    def _put_spans(self, count: int) -> None:
        spans, self._spans = self._spans[:count], self._spans[count:]
        for span in spans:
            self._put_span(span, self._take_ids(len(span.text)))

    def _take_ids(self, num_chars: int) -> list[int]:
        """Return the ids whose text begins in the next ``num_chars`` characters, which are delivered now."""
        self._num_put += num_chars
        pieces = self._pieces
        ids: list[int] = []
        while pieces and pieces[0][0] < self._num_put:
            taken = pieces.popleft()[2]
            ids = taken if not ids else ids + taken
        return ids

    def _put_span(
        self, span: Span, ids: list[int], reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> None:
        self.texts.append(span.text)
        if (texts := self._channel_to_texts.get(span.channel)) is not None:
            texts.append(span.text)
        if span.tool_call is not None:
            self._note_end(span)
        logprobs = None
        if self.logprobs is not None:
            start = self.num_delivered
            self.num_delivered = start + len(ids)
            logprobs = self.logprobs[start : self.num_delivered]
        self._put(TokenDelta(span.text, ids, self.index, logprobs, reason, stop_reason, span.channel, span.tool_call))

    def _note_end(self, span: Span) -> None:
        assert span.tool_call is not None
        if span.tool_call.call is not None:
            self._tool_calls.append(span.tool_call.call)
        elif span.tool_call.invalid is not None:
            self._invalid_tool_calls.append(span.tool_call.invalid)

    def _put_last(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Deliver all that is left, the last item with the reason."""
        self._spans += self._parser.close()
        last = self._spans.pop() if self._spans else Span(Channel.CONTENT, "")
        self._put_spans(len(self._spans))
        ids = self._take_ids(len(last.text))
        for _, _, rest in self._pieces:  # without text
            ids = ids + rest
        self._pieces.clear()
        has_call = self._tool_calls or (last.tool_call is not None and last.tool_call.call is not None)
        if reason is FinishReason.STOP and has_call:
            reason = self.finish_reason = FinishReason.TOOL_CALLS
        self._put_span(last, ids, reason, stop_reason)

    def completion(self, usage: Usage) -> Completion:
        """Return the sample as it stands; one that has not ended is an aborted one."""
        reasoning = self._channel_to_texts[Channel.REASONING]
        return msgspec.structs.replace(
            super().completion(usage),
            content="".join(self._channel_to_texts[Channel.CONTENT]),
            reasoning="".join(reasoning) if reasoning else None,
            tool_calls=list(self._tool_calls),
            invalid_tool_calls=list(self._invalid_tool_calls),
        )
