"""Start an engine for the async facade: the process and the caller's own side at the same time, shared by all who wait.

Invariant: the start goes on while one task waits for it. When the last one is cancelled the start is cancelled too, and
what it had begun - process, sockets, folder - is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncllm._session import Session
from asyncllm.checkpoint import check_runnable, open_checkpoint
from asyncllm.client.base import EngineCoreClient
from asyncllm.errors import AsyncLLMError, UsageError
from asyncllm.frontend.input_processor import InputProcessor
from asyncllm.frontend.output_processor import OutputProcessor
from asyncllm.frontend.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncllm._event_loop import EventLoop
    from asyncllm.client.async_mp import AsyncMPClient
    from asyncllm.config import EngineConfig

    ReportProgress = Callable[[str, float | None], None]

__all__ = ["SharedStart", "load_frontend"]


def load_frontend(config: EngineConfig) -> tuple[InputProcessor, OutputProcessor]:
    """Return both processors of the caller's side, ready to work.

    Blocks for some 0.2 s, with a vocabulary as large as Gemma's for 2.5 s; safe in a thread.

    :raises ModelError: the checkpoint or its tokenizer cannot be used.
    """
    checkpoint = open_checkpoint(config.model.model)
    if config.parallel.runs_own_models:  # what cannot be run should not be blamed on its tokenizer
        check_runnable(checkpoint)
    tokenizer = load_tokenizer(config, checkpoint)
    inputs = InputProcessor(config, checkpoint, tokenizer)
    inputs.chat.prepare()
    return inputs, OutputProcessor(tokenizer)


class SharedStart:
    """One start-up, as a task of nobody's. Made, waited for and cancelled in one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        report: ReportProgress | None,
        loop: EventLoop,
    ) -> None:
        self.event_loop = loop
        self._config = config
        self._report = report
        self._done = anyio.Event()
        self._scope = anyio.CancelScope()
        self._num_waiting = 0
        self._is_taken = False
        self._session: Session | None = None
        self._error: BaseException | None = None
        self._task = loop.spawn(self._run, "asyncllm start")

    @property
    def session(self) -> Session | None:
        """What was started; ``None`` while it starts, and if that failed."""
        return self._session

    @property
    def is_lost(self) -> bool:
        """Whether no session will come of it: it failed, was given up, or its event loop is over."""
        if self._done.is_set():
            return self._session is None
        return self._scope.cancel_called or not self.event_loop.is_alive()

    async def wait(self) -> Session:
        """Return the session once the engine is ready.

        Cancellation leaves the start to the others who wait; if there are none, it is cancelled.

        :raises EngineStartError: the engine did not become ready; typed errors come as themselves.
        :raises UsageError: it was closed while starting.
        """
        self._num_waiting += 1
        try:
            await self._done.wait()
        except BaseException:
            if self._num_waiting == 1 and not self._is_taken:
                self._give_up()
            raise
        finally:
            self._num_waiting -= 1
        if self._session is not None:
            self._is_taken = True
            return self._session
        if isinstance(self._error, AsyncLLMError):
            raise self._error.fresh()
        raise self._error or UsageError("this AsyncLLM was closed while it was starting")

    def _give_up(self) -> None:
        """End the start, or the engine if it has just become ready and nobody is left to take it."""
        self._scope.cancel()
        session, self._session = self._session, None
        if session is not None:
            self._task = self.event_loop.spawn(session.aclose, "asyncllm end")

    def cancel(self) -> None:
        """Give the start up; whoever waits gets a :class:`UsageError`. Any thread, and harmless once it is over."""
        if self._done.is_set():
            return
        if self.event_loop.is_current():
            self._scope.cancel()
        else:
            self.event_loop.run_soon(self._scope.cancel)

    async def wait_until_undone(self) -> None:
        """Wait until a cancelled start has left nothing behind; at once where it belongs to another event loop."""
        if self.event_loop.is_current():
            await self._done.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                self._session = await self._start()
            if self._scope.cancel_called and self._session is not None:  # too late to stop it
                session, self._session = self._session, None
                await session.aclose()
        except Exception as error:  # it is raised by wait()
            self._error = error
        finally:
            self._done.set()

    async def _start(self) -> Session:
        client = EngineCoreClient.make_client(self._config, "async")
        try:
            inputs, outputs = await self._start_both(client)
            inputs.set_info(client.info)
            return Session(client, inputs, outputs)
        except BaseException:
            await client.aclose()  # shields itself; nobody waits for this task
            raise

    async def _start_both(self, client: AsyncMPClient) -> tuple[InputProcessor, OutputProcessor]:
        """Start the engine while a thread opens the checkpoint; the first failure ends both."""
        loaded: list[tuple[InputProcessor, OutputProcessor]] = []
        failed: list[Exception] = []

        async def attempt(work: Callable[[], Awaitable[object]]) -> None:
            try:
                await work()
            except Exception as error:
                failed.append(error)
                group.cancel_scope.cancel()

        async def load() -> None:
            loaded.append(await anyio.to_thread.run_sync(load_frontend, self._config, abandon_on_cancel=True))

        async with anyio.create_task_group() as group:
            group.start_soon(attempt, load)
            group.start_soon(attempt, lambda: client.start(self._report))
        if failed:
            raise failed[0]
        return loaded[0]
