"""The asynchronous facade: one model, many streams, inside the caller's own event loop.

What lives here: the life of the engine as the user sees it, and the way of a request up to its being sent. The running
engine is :class:`asyncllm._session.Session`. Invariant: a request is checked completely in the caller's process, and
sent in one go with no await between registering and sending.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio.to_thread

from asyncllm._event_loop import current_event_loop, running_event_loop
from asyncllm._fan_out import FanOut
from asyncllm._request import ChatOptions, ChatRequest, PromptRequest, make_config, make_params
from asyncllm._start import SharedStart
from asyncllm.errors import ConfigError, DuplicateRequestError, UsageError
from asyncllm.token_stream import StreamInbox, TokenStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Unpack

    from asyncllm._fan_out import MakeInbox
    from asyncllm._request import Message, SamplingOptions
    from asyncllm._session import Session
    from asyncllm.config import EngineConfig
    from asyncllm.outputs import Completion
    from asyncllm.sampling_params import SamplingParams
    from asyncllm.wire.messages import EngineInfo, SchedulerStats

__all__ = ["AsyncLLM", "run"]

T = TypeVar("T")


class AsyncLLM(FanOut):
    """A model in an engine process of its own; works the same under asyncio, uvloop and trio.

    ``model`` is a Hugging Face folder, a ``.gguf`` file or an id in the local Hugging Face cache; ``engine_options``
    are the fields of :class:`asyncllm.EngineConfig` (``max_num_seqs=8`` …). The constructor only checks them. The
    engine is started by ``async with``, by :meth:`start`, or by the first use; ``on_progress(phase, fraction)`` is
    called as it comes up. One object serves one event loop at a time, and any number of them one after the other.

    :raises ConfigError: an option is unknown, out of range, or contradicts another one.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig,
        *,
        on_progress: Callable[[str, float | None], None] | None = None,
        **engine_options: Any,
    ) -> None:
        self._session: Session | None = None
        self._start: SharedStart | None = None
        self._closing: Session | None = None
        self._is_closed = False
        self._on_progress = on_progress
        self._counter = itertools.count(1)
        self._name_prefix = f"request-{os.urandom(4).hex()}-"  # no id that a caller thinks of
        self._streams: weakref.WeakValueDictionary[str, StreamInbox] = weakref.WeakValueDictionary()
        config = make_config(model, engine_options)
        if config.frontend.in_process:
            raise ConfigError(
                "in_process=True is for LLM and LLMEngine: an engine in this process would block the event loop",
                parameter="in_process",
                value=True,
            )
        self.config = config

    # ---------------------------------------------------------------------------------------------------- start and end
    async def start(self) -> None:
        """Start the engine, or wait for the start that is under way; return at once if it runs.

        After :meth:`aclose`, or after the engine died, a new one is started. Nothing blocks the event loop.
        Cancelling one of several callers leaves the start to the others; cancelling the last one ends it and leaves
        nothing behind.

        :raises ModelError: the checkpoint cannot be used.
        :raises EngineStartError: the engine did not become ready.
        :raises UsageError: the engine is in use on another event loop that still runs.
        """
        if self._session is not None and (self._session.is_closed or self._session.death is not None):
            await self.aclose()
        self._is_closed = False
        await self._started()

    async def _started(self) -> Session:
        """Return the running session on this event loop, starting it if nobody did."""
        session = self._session
        if session is None:
            if self._is_closed:
                raise UsageError("this AsyncLLM is closed; start() or `async with` starts it again")
            start = self._join_start()
            session = await start.wait()
            if self._start is start:
                self._start, self._session = None, session
        session.check()
        session.bind()
        return session

    def _join_start(self) -> SharedStart:
        loop = current_event_loop()
        start = self._start
        if start is None or start.is_lost:
            start = self._start = SharedStart(self.config, self._on_progress, loop)
        elif start.session is None and not start.event_loop.is_current():
            raise UsageError("this AsyncLLM is being started on another event loop that is still running")
        return start

    def _take_session(self) -> Session | None:
        """Return the session, also one whose start nobody waited for to the end, and forget it."""
        start, self._start = self._start, None
        session, self._session = self._session, None
        if start is not None:
            start.cancel()
            session = session or start.session
        return session

    async def aclose(self) -> None:
        """End the engine and leave nothing behind: no process, thread, task, socket or file.

        Streams end with what they hold and finish reason ``abort``. Idempotent; where another task is closing it, or a
        start has to be undone, it waits for that. Cancelling it makes the end a hard one.
        """
        self._is_closed = True
        start = self._start
        session = self._take_session() or self._closing
        if session is not None:
            self._closing = session
            await session.aclose()
            self._closing = None
        elif start is not None:
            await start.wait_until_undone()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "config"):  # the constructor came to its end
            session = self._take_session()
            if session is not None:
                session.drop()

    # --------------------------------------------------------------------------------------------------------- requests
    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Return the stream of tokens that continue ``prompt``, a text or token ids.

        How they are drawn is said by ``params`` or by keywords (``max_tokens=32``). ``request_id`` must not be that
        of a live request; one is made if it is absent. ``priority``: lower is more urgent (``policy="priority"``).
        ``cache_salt`` keeps prompts with different salts from sharing cached prefixes.

        If the engine runs and the prompt is short, the request is checked and on its way when this returns. Otherwise
        that happens when the stream is first awaited: the engine is started if needed, a long prompt is tokenized in
        a thread, and errors are raised there.

        :raises RequestError: the request is refused; nothing was sent.
        :raises EngineDeadError: the engine is gone.
        :raises UsageError: this object is closed.
        """
        request = PromptRequest(
            prompt=prompt, params=make_params(params, sampling), priority=priority, cache_salt=cache_salt
        )
        return self._open(request, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> TokenStream:
        """Return the stream of tokens that answer ``messages``, dicts with ``role`` and ``content``.

        The model's chat template (or ``chat_template``: jinja text, or a name where the model has several) makes the
        prompt of them, of ``tools`` (JSON schemas of functions), and of ``chat_template_kwargs``, variables that the
        template knows. ``continue_final_message``: the model goes on with the last message, else it begins a new one.
        ``tool_choice``: "auto", "none", "required", or the name of a tool. ``tool_parser`` and ``reasoning_parser``
        replace the engine's options of these names. All else as for :meth:`stream`.

        Each item says which ``channel`` it belongs to: content, reasoning, a tool call, or the markers between them.
        The completion has ``content``, ``reasoning`` and ``tool_calls``, and as :meth:`Completion.to_message` it is
        the next message of the chat.

        :raises RequestError: the request is refused: also where the model has no chat template, it does not show the
            tools, or it refuses the messages (:class:`asyncllm.ChatTemplateError`).
        """
        request = ChatRequest(
            messages=messages,
            options=ChatOptions(
                tools=tools,
                tool_choice=tool_choice,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
            ),
            params=make_params(params, sampling),
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._open(request, request_id)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Return the whole completion of ``prompt``; arguments and errors as for :meth:`stream`.

        Cancelling it aborts the request in the same tick. Of many that are gathered at once, each waits for its turn
        to be tokenized, so that the other tasks of the loop go on.
        """
        if self._session is not None:
            await self._session.pace.wait()
        stream = self.stream(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, **sampling
        )
        return await stream.completion()

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests by id: their readers get what is held and the finish reason ``abort``.

        Ids that do not live are ignored. The aborts are sent before the first await; returns once the engine has taken
        them in.

        :raises EngineDeadError: the engine is gone.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            inbox = self._streams.get(request_id)
            if inbox is not None and not inbox.is_over:
                self._end(inbox)
        if self._session is not None:
            await self._session.call("stats")

    def _end(self, inbox: StreamInbox) -> None:
        if inbox.port is not None and self._session is not None:
            self._session.end(inbox)
        else:
            inbox.end_unsent()

    # --------------------------------------------------------------------------------------------- the way of a request
    def _open(self, request: PromptRequest | ChatRequest, request_id: str | None) -> TokenStream:
        session = self._session
        if session is not None:
            session.check()
        elif self._is_closed:
            raise UsageError("this AsyncLLM is closed; start() or `async with` starts it again")
        inbox = self._claim(request_id, request.params.n)
        if session is None or not session.is_bound_here or request.is_long(session.inputs):
            return TokenStream(inbox, lambda: self._admit(request, inbox), self)
        began = time.perf_counter()
        try:
            session.submit(request.process(session.inputs, inbox.request_id), inbox)
        except BaseException:
            inbox.discard()  # frees the id: the traceback keeps the inbox
            raise
        session.pace.spend(began)
        return TokenStream(inbox, None, self)

    def _claim(self, request_id: str | None, num_samples: int, make_inbox: MakeInbox = StreamInbox) -> StreamInbox:
        """Return the inbox of a new request under ``request_id``."""
        if request_id is None:
            request_id = f"{self._name_prefix}{next(self._counter)}"
        elif not isinstance(request_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"request_id must be a string, not {type(request_id).__name__}")
        living = self._streams.get(request_id)
        if living is not None and not living.is_over:
            raise DuplicateRequestError(
                f"request_id {request_id!r} is that of a request that is still running",
                parameter="request_id",
                value=request_id,
                request_id=request_id,
            )
        inbox = make_inbox(request_id, num_samples, self.config.frontend.max_buffered_tokens)
        self._streams[request_id] = inbox
        return inbox

    async def _admit(self, request: PromptRequest | ChatRequest, inbox: StreamInbox) -> None:
        """Start the engine if needed, tokenize, and send: what :meth:`_open` could not do without awaiting."""
        session = await self._started()
        if request.is_long(session.inputs):
            processed = await anyio.to_thread.run_sync(
                request.process, session.inputs, inbox.request_id, abandon_on_cancel=True
            )
        else:
            await session.pace.wait()
            began = time.perf_counter()
            processed = request.process(session.inputs, inbox.request_id)
            session.pace.spend(began)
        if not inbox.is_over:  # cancelled from elsewhere meanwhile
            session.submit(processed, inbox)

    # ------------------------------------------------------------------------------------------------------- the engine
    async def _call(self, method: str, *args: Any) -> Any:
        session = await self._started()
        return await session.call(method, *args)

    async def stats(self) -> SchedulerStats:
        """Return the scheduler's state and counters, as of the step after every request and abort sent so far."""
        return await self._call("stats")

    async def check_health(self) -> None:
        """Return if the engine lives and answers.

        :raises EngineDeadError: it does not.
        """
        await self._call("check_health")

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; ``False``, and nothing done, while requests hold blocks.

        ``reset_running``: preempt those first; they go on later and compute everything again.
        """
        return await self._call("reset_prefix_cache", reset_running)

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``method`` on every worker between two steps and return their values in rank order. Plain data only.

        :raises UtilityError: it failed in a worker; the engine goes on.
        """
        return await self._call("collective_rpc", method, list(args), kwargs)

    async def start_profile(self, directory: str | os.PathLike[str] = "asyncllm-profile") -> None:
        """Begin to record what the workers do; :meth:`stop_profile` writes the traces into ``directory``."""
        await self._call("start_profile", os.path.abspath(directory))  # noqa: ASYNC240  (asks no disk)

    async def stop_profile(self) -> list[str]:
        """Stop recording and return the paths of the trace files, one per worker."""
        return await self._call("stop_profile")

    async def pause(self) -> None:
        """Run no further step; requests keep their place and their blocks."""
        await self._call("pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._call("resume")

    async def sleep(self, level: int = 1) -> None:
        """Give the engine's memory back until :meth:`wake_up`; returns once that is done.

        Level 1 drops the KV cache, and moves the weights of a GPU to the host's memory; those of a CPU stay. Level 2
        drops the weights as well, to be read from the checkpoint again. Requests that run are preempted; they and those
        that come meanwhile wait, and go on after :meth:`wake_up` with the tokens that they would have had. Idempotent;
        level 2 may follow level 1. Cancelling it does not keep the engine from falling asleep once it was asked to.

        :raises UsageError: there is no such level.
        :raises InsufficientMemoryError: the host has no room for the weights of a GPU.
        """
        await self._call("sleep", level)

    async def wake_up(self) -> None:
        """Go on after :meth:`sleep`; returns once steps can run. Idempotent.

        :raises ModelError: the checkpoint is gone, or is another model now.
        :raises InsufficientMemoryError: somebody else has taken the memory. The engine sleeps on, as after any error
            here, and can be woken later.
        """
        await self._call("wake_up")

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no request is in flight; ``False`` if some still were after ``timeout_s``."""
        if self._session is None:
            return True
        return await self._session.drain(timeout_s)

    # ------------------------------------------------------------------------------------------------------------ facts
    @property
    def healthy(self) -> bool:
        """Whether the engine runs, as far as is known here; :meth:`check_health` asks it."""
        return self._session is not None and not self._session.client.is_dead and self._session.death is None

    @property
    def errored(self) -> bool:
        """Whether the engine died while it was in use."""
        return self._session is not None and self._session.death is not None

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine, ``None`` where there is none."""
        return self._session.client.engine_pid if self._session is not None else None

    @property
    def info(self) -> EngineInfo:
        """What the engine found out while it started.

        :raises UsageError: it was not started.
        """
        if self._session is None:
            raise UsageError("the engine was not started")
        return self._session.client.info

    @property
    def num_unfinished(self) -> int:
        """Samples that this process still expects tokens of."""
        return self._session.outputs.num_unfinished if self._session is not None else 0

    def __repr__(self) -> str:
        state = (
            "closed" if self._is_closed else "errored" if self.errored else "running" if self.healthy else "not started"
        )
        return f"<AsyncLLM {self.config.model.model!r} {state}>"


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any, debug: bool | None = None) -> T:
    """Return what ``main(*args)`` returns, run in a new event loop: uvloop's where it is installed, else asyncio's.

    As ``asyncio.run``: the main thread only gets KeyboardInterrupt as a cancellation, tasks left over are cancelled.

    :raises UsageError: a loop runs in this thread already, or ``main`` is a coroutine instead of a function.
    """
    if isinstance(main, Coroutine):
        main.close()  # it will never be awaited, and that is told here
        raise UsageError("asyncllm.run(main()) was given a coroutine; pass the function, not its call: run(main)")
    if running_event_loop() is not None:
        raise UsageError("a loop is running here (a notebook?): write `await main()` in place of asyncllm.run(main)")
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(main(*args))
