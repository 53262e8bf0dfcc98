"""A prefix that many requests begin with: computed once, its KV blocks kept until the ``async with`` block is left.

Invariant: the engine is told of the end of a prefix on every way out, in the same tick and without awaiting.

    made ──async with: tokenize, pin, compute──► pinned ──exit, cancel, error──► over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import anyio.to_thread

from asyncllm._request import ChatRequest, PromptRequest, make_params
from asyncllm.errors import InvalidParameterError, RequestTooLargeError, UsageError
from asyncllm.sampling_params import SamplingParams
from asyncllm.token_stream import StreamInbox, TokenStream
from asyncllm.wire.messages import PinPrefix

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from asyncllm._request import ChatOptions, Message, RequestPath, SamplingOptions
    from asyncllm._session import Session
    from asyncllm.frontend.input_processor import ProcessedRequest
    from asyncllm.outputs import Completion

__all__ = ["Prefix"]

COMPUTE_ONLY = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""One token has to be drawn for a prompt to be computed; it is thrown away."""


class PrefixText:
    """What a prefix is made of, as the caller gave it."""

    def __init__(
        self,
        content: str | Sequence[int] | Sequence[Message],
        options: ChatOptions,
        cache_salt: str | None,
    ) -> None:
        self.content = content
        self.options = options
        self.cache_salt = cache_salt
        self.is_chat = not isinstance(content, str) and any(isinstance(part, Mapping) for part in content)


class Prefix:
    """A pinned prefix; made by :meth:`asyncllm.AsyncLLM.prefix` and used in ``async with``.

    Requests made through it begin with it. Its blocks give way only where the engine would stand still otherwise, or
    where it forgets all blocks (``reset_prefix_cache``, ``sleep``); the next request made through it that ends then
    brings them back.
    """

    def __init__(
        self, path: RequestPath, text: PrefixText, *, max_prefix_tokens: int | None, max_fraction: float
    ) -> None:
        self._path = path
        self._text = text
        self._max_prefix_tokens = max_prefix_tokens
        self._max_fraction = max_fraction
        self._session: Session | None = None
        self._pin_id = 0
        self._token_ids: list[int] = []
        self._made: list[StreamInbox] = []  # those not yet counted for good
        self._num_requests = self._num_hits = self._num_hit_tokens = 0

    # ---------------------------------------------------------------------------------------------------- begin and end
    async def __aenter__(self) -> Self:
        """Pin the prefix and compute it; returns once it is there. Cancelling it leaves nothing behind.

        :raises RequestTooLargeError: it has more tokens than it may, or all pinned ones more blocks.
        :raises RequestError: it is no prompt.
        :raises UsageError: it is in use already.
        """
        if self._session is not None:
            raise UsageError("this prefix is in use already")
        session = await self._path.started()
        inbox = self._path.claim(None, 1, StreamInbox)
        pin_id = session.inputs.make_engine_id()
        request = self._own_request(pin_id)
        try:
            if request.is_long(session.inputs):
                processed = await anyio.to_thread.run_sync(
                    request.process, session.inputs, inbox.request_id, abandon_on_cancel=True
                )
            else:
                processed = request.process(session.inputs, inbox.request_id)
            self._pin(session, processed, pin_id)
            session.submit(processed, inbox)
            await TokenStream(inbox, None, self._path.owner).completion()
        except BaseException:
            inbox.discard()
            self._release()
            raise
        return self

    def _own_request(self, pin_id: int) -> PromptRequest | ChatRequest:
        text = self._text
        if not text.is_chat:
            prompt = cast("str | Sequence[int]", text.content)
            return PromptRequest(prompt=prompt, params=COMPUTE_ONLY, cache_salt=text.cache_salt, prefix_id=pin_id)
        return ChatRequest(
            messages=cast("Sequence[Message]", text.content),
            options=replace(text.options, add_generation_prompt=False),
            params=COMPUTE_ONLY,
            cache_salt=text.cache_salt,
            prefix_id=pin_id,
        )

    def _pin(self, session: Session, processed: ProcessedRequest, pin_id: int) -> None:
        ids, limit = processed.prompt_token_ids, self._max_prefix_tokens
        if limit is not None and len(ids) > limit:
            raise RequestTooLargeError(
                f"the prefix has {len(ids)} tokens; max_prefix_tokens is {limit}",
                parameter="prefix",
                value=len(ids),
                limit=limit,
            )
        session.pin(PinPrefix(pin_id, ids, self._text.cache_salt), self._max_fraction)
        self._session, self._pin_id, self._token_ids = session, pin_id, ids

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        """Let go of the prefix. Any thread, idempotent, never awaits; requests that run go on."""
        session, self._session = self._session, None
        if session is not None:
            session.unpin(self._pin_id)

    def __del__(self) -> None:
        if getattr(self, "_session", None) is not None:
            self._release()

    # --------------------------------------------------------------------------------------------------------- requests
    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Return the stream of tokens that continue the prefix and ``prompt``, as of one text.

        A text goes after a prefix of text; ids go after one of text or of ids. All else as for
        :meth:`asyncllm.AsyncLLM.stream`, also the errors.

        :raises InvalidParameterError: ``prompt`` does not go with the prefix.
        :raises UsageError: the prefix is not pinned: outside of its ``async with`` block.
        """
        self._pinned()
        request = PromptRequest(
            prompt=self._continued(prompt),
            params=make_params(params, sampling),
            priority=priority,
            cache_salt=self._text.cache_salt,
            prefix_id=self._pin_id,
        )
        return self._open(request, request_id)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Return the whole completion; arguments and errors as for :meth:`stream`."""
        session = self._pinned()
        await session.pace.wait()
        return await self.stream(prompt, params, request_id=request_id, priority=priority, **sampling).completion()

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Return the stream of tokens that answer the messages of the prefix and ``messages``, as one conversation.

        Tools and template are those of the prefix. All else as for :meth:`asyncllm.AsyncLLM.chat`.

        :raises InvalidParameterError: the prefix is not of messages.
        :raises UsageError: the prefix is not pinned: outside of its ``async with`` block.
        """
        self._pinned()
        text = self._text
        if not text.is_chat:
            raise InvalidParameterError("the prefix is a prompt; chat() goes on from messages", parameter="messages")
        request = ChatRequest(
            messages=[*cast("Sequence[Message]", text.content), *messages],
            options=text.options,
            params=make_params(params, sampling),
            priority=priority,
            cache_salt=text.cache_salt,
            prefix_id=self._pin_id,
        )
        return self._open(request, request_id)

    def _continued(self, prompt: Any) -> str | list[int]:
        if self._text.is_chat:
            raise InvalidParameterError("the prefix is messages; chat() goes on from them", parameter="prompt")
        if isinstance(prompt, str):
            if not isinstance(self._text.content, str):
                raise InvalidParameterError(
                    "the prefix is token ids, and prompt a text; give token ids", parameter="prompt"
                )
            return self._text.content + prompt
        return [*self._token_ids, *prompt]

    def _open(self, request: PromptRequest | ChatRequest, request_id: str | None) -> TokenStream:
        stream = self._path.open_stream(request, request_id)
        self._made.append(stream.inbox)
        if len(self._made) >= 64 and not len(self._made) & (len(self._made) - 1):
            self._count_ended()
        return stream

    def _pinned(self) -> Session:
        session = self._session
        if session is None:
            raise UsageError("this prefix is not pinned: use it inside its `async with` block")
        return session

    # ------------------------------------------------------------------------------------------------------------ facts
    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix; 0 before it is pinned."""
        return len(self._token_ids)

    @property
    def num_requests(self) -> int:
        """Requests made through it of which it is known what they found: those with a first token, or that ended."""
        self._count_ended()
        return self._num_requests + sum(_has_begun(inbox) for inbox in self._made)

    @property
    def num_hits(self) -> int:
        """Of ``num_requests``, those that computed no token of the prefix."""
        self._count_ended()
        return self._num_hits + sum(self._is_hit(inbox) for inbox in self._made if _has_begun(inbox))

    @property
    def num_hit_tokens(self) -> int:
        """Tokens of prompts, over ``num_requests``, that were not computed again."""
        self._count_ended()
        return self._num_hit_tokens + sum(_num_cached(inbox) for inbox in self._made if _has_begun(inbox))

    def _count_ended(self) -> None:
        """Count those that have ended for good, and forget them."""
        for inbox in self._made:
            if inbox.is_over and _has_begun(inbox):
                self._num_requests += 1
                self._num_hits += self._is_hit(inbox)
                self._num_hit_tokens += _num_cached(inbox)
        self._made = [inbox for inbox in self._made if not inbox.is_over]

    def _is_hit(self, inbox: StreamInbox) -> bool:
        """Return whether a request found all tokens that it has in common with the prefix; its last is computed."""
        assert inbox.request is not None
        ids, prompt = self._token_ids, inbox.request.prompt_token_ids
        num_common = len(ids)
        if prompt[: len(ids)] != ids:  # tokens that reach over the border are others in the whole text
            pairs = zip(ids, prompt, strict=False)
            num_common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))
        return _num_cached(inbox) >= min(num_common, len(prompt) - 1) > 0

    def __repr__(self) -> str:
        state = f"{self.num_tokens} tokens, {self.num_hits} of {self.num_requests} hits"
        return f"<Prefix {state if self._session is not None else 'not pinned'}>"


def _has_begun(inbox: StreamInbox) -> bool:
    request = inbox.request
    return request is not None and (request.first_token_at is not None or inbox.ended)


def _num_cached(inbox: StreamInbox) -> int:
    assert inbox.request is not None
    return min(sample.num_cached_tokens for sample in inbox.request.samples)
