"""One request to many, many prompts to one engine: what :class:`asyncllm.AsyncLLM` offers to agents and batches.

Here: the arguments. Branch points and seeds are decided in :mod:`asyncllm._branches`, pinned prefixes are
:mod:`asyncllm.prefix`, and :mod:`asyncllm._many` keeps a bounded number of prompts in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from asyncllm._branches import branch_requests
from asyncllm._many import Batch, Completions, InOrder, take_any
from asyncllm._request import ChatOptions, ChatRequest, PromptRequest, RequestPath, make_params
from asyncllm.errors import InvalidParameterError, shown
from asyncllm.prefix import Prefix, PrefixText
from asyncllm.token_stream import Branches, StreamInbox, TokenStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Sequence
    from typing import Unpack

    from asyncllm._request import BranchOptions, Message, SamplingOptions
    from asyncllm._session import Session
    from asyncllm.config import EngineConfig
    from asyncllm.outputs import Completion
    from asyncllm.sampling_params import SamplingParams

__all__ = ["FanOut"]

MakeInbox = Callable[[str, int, int], StreamInbox]


class FanOut(ABC):
    """The half of :class:`asyncllm.AsyncLLM` that makes several requests of one call."""

    config: EngineConfig

    # -------------------------------------------------------------------------------------------------------- branches
    def fork(
        self,
        source: TokenStream | Completion,
        n: int | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        index: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[BranchOptions],
    ) -> Branches:
        """Return a list of ``n`` streams (one, if not said) that go on from where ``source`` is.

        That is after the last token that a stream has yielded (``index``: of which sample), which goes on by itself; or
        after the last token of a completion. Each branch is a request of its own, whose prompt is the prompt and the
        output so far, and whose text goes on exactly where the text of the source stands. Counts (``max_tokens``,
        ``min_tokens``), stop strings, and penalties on the output begin at the branch.

        As ``async with`` block the list aborts, when it is left, those branches that have not ended.

        A branch of a running request shares its blocks and computes none of its tokens again. Of one that has ended,
        or was preempted, it finds what the prefix cache still has; its ``usage.cached_tokens`` say how much.

        ``params``: for all branches, or a list with those of each. Without it a branch of a stream has the stream's
        own, changed by keywords (``temperature=1.0``); one of a completion has the keywords alone, as a completion does
        not know its parameters. A seed that is given here is that of the first branch, the next have the numbers after
        it. A stream's own seed gives each branch another one, the same in each run. Without a seed each has a random
        one.

        Structured output has to be left out (``schema=None``) or given anew: a grammar cannot go on in the middle. The
        text of a chat's branch is not cut into channels.

        :raises UsageError: the request of ``source`` was not sent yet, or this object is closed.
        :raises RequestError: a branch is refused; none is made.
        :raises EngineDeadError: the engine is gone.
        """
        requests = branch_requests(source, n, params, sampling, index=index, cache_salt=cache_salt)
        streams = Branches()
        try:
            streams.extend(self._open(request, None) for request in requests)
        except BaseException:
            streams.cancel()
            raise
        return streams

    # -------------------------------------------------------------------------------------------------------- prefixes
    def prefix(
        self,
        content: str | Sequence[int] | Sequence[Message],
        *,
        max_prefix_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> Prefix:
        """Return a prefix (text, token ids, or messages) to be pinned with ``async with``; that computes it.

        Requests made through it (``p.stream(…)``, ``p.generate(…)``, ``p.chat(…)``) begin with it and compute none of
        it again: its KV blocks stay until the block is left. All pinned prefixes may take ``max_pinned_fraction`` of
        the engine's blocks, and this one ``max_prefix_tokens`` tokens. A text and what follows are tokenized as a
        whole, so the tokens are those of ``llm.stream(text + prompt)``.
        """
        options = ChatOptions(tools=tools, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs)
        text = PrefixText(content, options, cache_salt)
        max_fraction = self.config.cache.max_pinned_fraction
        return Prefix(self._path(), text, max_prefix_tokens=max_prefix_tokens, max_fraction=max_fraction)

    # ----------------------------------------------------------------------------------------------------- many prompts
    def map(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
        progress: bool | None = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Completions[Completion]:
        """Return the completions of ``prompts`` in their order, to be iterated over with ``async for``.

        A prompt is a text, token ids, or a list of messages. They are taken one by one as there is room: at most
        ``max_in_flight`` (``max_num_seqs``, if not said) requests are in flight. ``progress``: show a bar; ``None``: on
        a terminal. The first error aborts the rest and is raised; leaving the loop aborts the rest as well.

        :raises InvalidParameterError: ``max_in_flight`` or ``prompts`` is out of range.
        """
        return Completions(self._batch(prompts, params, max_in_flight, progress, sampling), InOrder())

    def as_completed(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        params: SamplingParams | None = None,
        *,
        max_in_flight: int | None = None,
        progress: bool | None = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Completions[tuple[int, Completion]]:
        """Return ``(number of the prompt, completion)`` as they end; all else as for :meth:`map`."""
        return Completions(self._batch(prompts, params, max_in_flight, progress, sampling), take_any)

    def _batch(
        self, prompts: Any, params: SamplingParams | None, limit: Any, progress: bool | None, sampling: SamplingOptions
    ) -> Batch:
        given = make_params(params, sampling)
        if limit is None:
            limit = self.config.scheduler.max_num_seqs
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InvalidParameterError(
                f"max_in_flight is {shown(limit)!r}; it must be at least 1",
                parameter="max_in_flight",
                value=shown(limit),
                limit=1,
            )

        def make_request(prompt: Any) -> PromptRequest | ChatRequest:
            if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
                return ChatRequest(messages=cast("Sequence[Message]", prompt), params=given)
            return PromptRequest(prompt=cast("str | Sequence[int]", prompt), params=given)

        return Batch(self._path(), prompts, make_request, max_in_flight=limit, progress=progress)

    # ------------------------------------------------------------------------------------------- the way of a request
    def _path(self) -> RequestPath:
        return RequestPath(self, started=self._started, claim=self._claim, open_stream=self._open, admit=self._admit)

    @abstractmethod
    async def _started(self) -> Session: ...

    @abstractmethod
    def _claim(self, request_id: str | None, num_samples: int, make_inbox: MakeInbox = StreamInbox) -> StreamInbox: ...

    @abstractmethod
    def _open(self, request: PromptRequest | ChatRequest, request_id: str | None) -> TokenStream: ...

    @abstractmethod
    async def _admit(self, request: PromptRequest | ChatRequest, inbox: StreamInbox) -> None: ...
