"""The caller's end of one engine process: what the blocking and the awaiting client share, which only wait differently.

Threads: :meth:`EngineConnection.send` may be called from any thread, a signal handler or ``__del__``; all else belongs
to the one reader. Nothing here waits. Invariants: messages reach the engine in the order of the ``send`` calls; every
pending utility call is answered, by the engine or with the reason why it never will be; what an engine sent before it
died is handed out before its death is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import zmq

from asyncllm import env
from asyncllm.client.launcher import EngineProcess
from asyncllm.config import EngineConfig, FrontendConfig
from asyncllm.errors import (
    AsyncLLMError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    EngineStartTimeoutError,
    ErrorInfo,
    UsageError,
    UtilityError,
)
from asyncllm.wire.codec import encode, output_decoder
from asyncllm.wire.messages import (
    Configure,
    EngineCoreOutputs,
    EngineDied,
    EngineInfo,
    EngineInput,
    EngineOutput,
    EngineReady,
    SchedulerStats,
    Shutdown,
    StartupFailed,
    StartupProgress,
    UtilityCall,
    UtilityResult,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from asyncllm.client.base import ReportStartup

__all__ = ["EngineConnection", "PendingCall"]

E = TypeVar("E", bound=AsyncLLMError)
DRAIN_TIMEOUT_S = 0.25
"""After a death, how long to wait for the end of the engine's connection; it comes at once unless a fork holds it."""
DYING_TIMEOUT_S = 0.5
"""How long an engine that announced its death may take to end, before its callers are told without the exit code."""

UTILITY_TO_TYPE: dict[str, Any] = {"stats": SchedulerStats}
"""What a utility's answer is, where it is not plain data."""


class PendingCall:
    """A utility call that waits for its answer; ``wake`` is called once ``done``."""

    __slots__ = ("done", "error", "method", "value", "wake")

    def __init__(self, method: str, wake: Callable[[], object]) -> None:
        self.method = method
        self.wake = wake
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class EngineConnection:
    """Starts the engine process; see the module for who may call what.

    ``remedy`` is what a caller is told to do when a signal has ended it.

    :raises ConfigError: the configuration holds something that is not plain data.
    :raises EngineStartError: the process could not be started.
    """

    def __init__(self, config: EngineConfig, remedy: str = "start a new one") -> None:
        self._remedy = remedy
        self._decode = output_decoder()
        self._configure: bytes | None = _encode_config(config)
        self.startup_timeout_s = _startup_timeout_s(config)
        self.shutdown_timeout_s = config.frontend.shutdown_timeout_s
        self.process = EngineProcess()
        self._unsent: deque[bytes] = deque()
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._pending_calls: dict[int, PendingCall] = {}
        self._next_call_id = 0
        self._phase = "process"
        self._phase_to_seconds: dict[str, float] = {}
        self._is_closing = False
        self._closed = False
        self._heard_death_at: float | None = None
        self._drained = False
        self._cause: AsyncLLMError | None = None
        self._death: tuple[str, int | None, str] | None = None

    # ----------------------------------------------------------------------------------------------------- sending
    def send(self, message: EngineInput) -> None:
        """Send ``message``, or leave it in a deque that is flushed with the next message or read. Never blocks.

        :raises OverflowError: a number does not fit 64 bits; nothing was sent.
        """
        self._unsent.append(encode(message))
        self.flush()

    def flush(self) -> None:
        """Send what waits in the deque, in order.

        A thread that finds the socket taken leaves its message to the one that has it, which looks at the deque again
        after it let the socket go. So nobody waits, not even a ``__del__`` that runs inside another ``send``.
        """
        while self._unsent and self._send_lock.acquire(blocking=False):
            try:
                self._send_unsent()
            except zmq.Again:  # not connected yet, or not any more
                return
            finally:
                self._send_lock.release()

    def _send_unsent(self) -> None:
        unsent, socket = self._unsent, self.process.sockets.to_engine
        if self.is_dead:
            unsent.clear()
        while unsent:
            socket.send(unsent[0], zmq.NOBLOCK)
            unsent.popleft()

    # --------------------------------------------------------------------------------------------------- receiving
    def receive(self) -> EngineOutput | None:
        """Return the next message, ``None`` if there is none now. An undecodable frame counts as the engine's death."""
        with self._receive_lock:
            if self._closed:
                return None
            try:
                frame = self.process.sockets.from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
        try:
            return self._decode(frame)
        except msgspec.DecodeError as error:
            self.process.kill()
            return EngineDied(ErrorInfo("EngineError", f"a frame of {len(frame)} bytes cannot be decoded: {error}"))

    def next_outputs(self) -> EngineCoreOutputs | None:
        """Return the outputs of the next step, ``None`` if there are none now; answers utility calls on the way."""
        if self._unsent:
            self.flush()
        while (message := self.receive()) is not None:
            if type(message) is EngineCoreOutputs:
                return message
            self._handle(message)
        return None

    def _handle(self, message: EngineOutput) -> None:
        if isinstance(message, UtilityResult):
            self._answer(message)
        elif isinstance(message, EngineDied):
            self._cause = AsyncLLMError.from_info(message.error, otherwise=EngineError)
            self._heard_death_at = time.monotonic()

    # --------------------------------------------------------------------------------------------------- start-up
    def next_startup_step(self, report: ReportStartup | None) -> EngineInfo | None:
        """Take in what arrived while starting; return what the engine found out once it is ready.

        :raises EngineStartError: the engine gave up or its process ended; typed errors come as themselves.
        """
        if self._is_closing or self._closed:
            raise EngineStartError("the engine was closed while it was starting", phase=self._phase)
        ended = self.process.has_ended()  # before the last look at the socket
        self.flush()
        while (message := self.receive()) is not None:
            if isinstance(message, StartupProgress):
                self._handle_progress(message, report)
            elif isinstance(message, EngineReady):
                return self._info(message.info)
            elif isinstance(message, StartupFailed):
                raise self._startup_error(message)
            elif isinstance(message, EngineDied):
                raise AsyncLLMError.from_info(message.error, otherwise=EngineStartError)
        if ended and self.has_drained():
            raise self._ended_while_starting()
        return None

    def _handle_progress(self, message: StartupProgress, report: ReportStartup | None) -> None:
        if message.phase == "hello":  # repeated until answered, so that the flush above gets its chance
            if self._configure is not None:
                self._phase_to_seconds["process"] = time.monotonic() - self.process.started_at
                self._unsent.append(self._configure)
                self._configure = None
                self.flush()
            return
        self._phase = message.phase
        if report is not None:
            report(message.phase, message.fraction)

    def _info(self, info: EngineInfo) -> EngineInfo:
        seconds = {**self._phase_to_seconds, **info.phase_to_seconds}
        seconds["total"] = time.monotonic() - self.process.started_at
        return msgspec.structs.replace(info, phase_to_seconds=seconds)

    def _startup_error(self, message: StartupFailed) -> AsyncLLMError:
        error = AsyncLLMError.from_info(message.error, otherwise=EngineStartError)
        if isinstance(error, EngineStartError):
            error.phase = error.phase or message.phase or self._phase
            error.log_tail = error.log_tail or self.process.runtime_dir.log_tail()
        return error

    def _ended_while_starting(self) -> EngineStartError:
        exit_code, log_tail = self._wait_for_exit_code(), self.process.runtime_dir.log_tail()
        hint = " (is there enough memory? the kernel kills a process that takes too much)" if exit_code == -9 else ""
        error = EngineStartError(
            f"engine initialization failed: process {self.process.pid} {describe_exit(exit_code)} "
            f"in phase {self._phase!r}{hint}",
            phase=self._phase,
            exit_code=exit_code,
            log_tail=log_tail,
        )
        return with_log_note(error, log_tail)

    def startup_timed_out(self) -> EngineStartTimeoutError:
        """Return the error that says how long the start took, where it is, and how to allow more."""
        log_tail = self.process.runtime_dir.log_tail()
        error = EngineStartTimeoutError(
            f"the engine was still starting after {self.startup_timeout_s:g} s, in phase {self._phase!r}; "
            "raise startup_timeout_s (or ASYNCLLM_STARTUP_TIMEOUT_S) if this model needs longer",
            phase=self._phase,
            log_tail=log_tail,
        )
        return with_log_note(error, log_tail)

    # -------------------------------------------------------------------------------------------------- utilities
    def call(self, method: str, args: tuple[Any, ...], wake: Callable[[], object]) -> PendingCall:
        """Send a utility call and return it; ``wake`` is called when it is answered or cannot be any more.

        :raises EngineDeadError: the engine is gone.
        :raises UtilityError: an argument is not plain data; nothing was sent.
        """
        self.raise_if_gone()
        call = PendingCall(method, wake)
        self._next_call_id += 1
        try:
            frame = encode(UtilityCall(self._next_call_id, method, list(args)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UtilityError(f"an argument of {method!r} is not plain data: {error}", method=method) from error
        self._pending_calls[self._next_call_id] = call
        self._unsent.append(frame)
        self.flush()
        return call

    def drop(self, call: PendingCall) -> None:
        """Forget ``call``; its answer, should it still come, is ignored."""
        for call_id, pending in self._pending_calls.items():
            if pending is call:
                del self._pending_calls[call_id]
                return

    @property
    def num_pending_calls(self) -> int:
        """Return how many utility calls wait for an answer."""
        return len(self._pending_calls)

    def _answer(self, result: UtilityResult) -> None:
        call = self._pending_calls.pop(result.call_id, None)
        if call is None:  # its caller was cancelled
            return
        if result.error is None:
            expected = UTILITY_TO_TYPE.get(call.method)
            call.value = result.value if expected is None else msgspec.convert(result.value, expected)
        else:
            call.error = AsyncLLMError.from_info(result.error, otherwise=UtilityError)
            if isinstance(call.error, UtilityError):
                call.error.method = call.method
        call.done = True
        call.wake()

    def _fail_calls(self, make_error: Callable[[], EngineDeadError]) -> None:
        while self._pending_calls:
            _, call = self._pending_calls.popitem()
            call.error = make_error()
            call.done = True
            call.wake()

    # ------------------------------------------------------------------------------------------------------- death
    def is_ending(self) -> bool:
        """Return whether the engine is dead or said that it dies; then :meth:`has_drained` decides when to tell."""
        if self._heard_death_at is None and self.process.has_ended():
            self._heard_death_at = time.monotonic()
        return self._heard_death_at is not None

    def has_drained(self) -> bool:
        """Return whether all that a dead engine sent can be read now (or has been).

        zmq reads a dead peer's last bytes in its own thread, and reports the end of the connection after the last one.
        """
        if self._drained or self._closed:
            return True
        if self._heard_death_at is None:
            self._heard_death_at = time.monotonic()
        waited_s = time.monotonic() - self._heard_death_at
        if self._cause is not None and not self.process.has_ended():
            self._drained = waited_s > DYING_TIMEOUT_S
        else:
            never_connected = self._configure is not None
            self._drained = self._saw_disconnect() or never_connected or waited_s > DYING_TIMEOUT_S + DRAIN_TIMEOUT_S
        return self._drained

    def _saw_disconnect(self) -> bool:
        try:
            self.process.sockets.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def bury(self) -> None:
        """Note how the engine died, and fail every pending call. From now on :meth:`raise_if_dead` raises."""
        if self._death is None:
            self.process.kill()  # what it left in its session, and itself if it said it dies and does not
            exit_code = self._wait_for_exit_code()
            is_closed = self._is_closing or self._closed
            said = "was closed" if is_closed else describe_exit(exit_code)
            if exit_code == -signal.SIGKILL and not is_closed:
                said += " (often the kernel's out-of-memory killer)"
            cause = f": {self._cause}" if self._cause else ""
            remedy = f"; {self._remedy}" if exit_code is not None and exit_code < 0 and not is_closed else ""
            self._death = (
                f"engine process {self.process.pid} {said}{cause}{remedy}",
                exit_code,
                self.process.runtime_dir.log_tail(),
            )
        self._fail_calls(self.death_error)

    def _wait_for_exit_code(self) -> int | None:
        """Return the exit code; a process whose pipe is closed is a zombie a moment later."""
        deadline = time.monotonic() + 0.1
        while (exit_code := self.process.exit_code()) is None and self.process.has_ended():
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)
        return exit_code

    def death_error(self) -> EngineDeadError:
        """Return a new error that tells how the engine died (each raise needs its own traceback)."""
        message, exit_code, log_tail = self._death or ("the engine was closed", None, "")
        error = EngineDeadError(message, exit_code=exit_code, log_tail=log_tail)
        error.__cause__ = self._cause
        return with_log_note(error, log_tail)

    def raise_if_dead(self) -> None:
        """Return unless the engine's end was told already, or the client closed.

        :raises EngineDeadError: it was.
        :raises UsageError: this process is a fork of the one that started it.
        """
        self.check_owner()
        if self._death is not None or self._closed:
            raise self.death_error()

    def check_owner(self) -> None:
        """Return in the process that started the engine.

        :raises UsageError: this is a fork of it, which has the sockets but none of the threads behind them.
        """
        if os.getpid() != self.process.owner_pid:
            raise UsageError(
                f"this engine belongs to process {self.process.owner_pid}, of which this one is a fork: "
                "start an engine of its own after the fork"
            )

    def raise_if_gone(self) -> None:
        """Return if the engine may take another message; before its death was told, outputs may still be there to read.

        :raises EngineDeadError: it is dead.
        """
        self.raise_if_dead()
        if self._unsent and self.process.has_ended():
            raise EngineDeadError(f"engine process {self.process.pid} has ended", exit_code=self.process.exit_code())

    @property
    def is_dead(self) -> bool:
        """Return whether the engine's death was noticed or it was closed."""
        return self._death is not None or self._closed

    # ------------------------------------------------------------------------------------------------------- close
    def request_shutdown(self) -> None:
        """Ask the engine to end after the step that is running."""
        self._is_closing = True
        self.send(Shutdown())

    def mark_closed(self) -> None:
        """Touch the sockets no more: from now on nothing is sent or received, and calls raise. Idempotent."""
        with _taken(self._send_lock), _taken(self._receive_lock):
            self._closed = True
            self._unsent.clear()

    def close(self, *, grace_s: float) -> None:
        """End the process (see :meth:`EngineProcess.end`), fail what is pending, and free everything. Idempotent."""
        self.mark_closed()
        self.process.end(grace_s=grace_s)
        self._fail_calls(self.death_error)


@contextlib.contextmanager
def _taken(lock: threading.Lock) -> Generator[None]:
    """Hold ``lock``, or go on without it after a while: a signal handler may close what its own thread has locked."""
    held = lock.acquire(timeout=0.2)
    try:
        yield
    finally:
        if held:
            lock.release()


def _encode_config(config: EngineConfig) -> bytes:
    try:
        return encode(Configure(dataclasses.asdict(config)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"an engine option (executor_options?) is not plain data: {error}") from error


def describe_exit(exit_code: int | None) -> str:
    """Return how a process ended, in words."""
    if exit_code is None:
        return "ended with an unknown exit code"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def with_log_note(error: E, log_tail: str) -> E:
    """Return ``error`` with the end of the engine's log as a note."""
    if log_tail:
        error.add_note("Last lines of the engine's log:\n" + log_tail)
    return error


def _startup_timeout_s(config: EngineConfig) -> float:
    option = config.frontend.startup_timeout_s
    if option != FrontendConfig.startup_timeout_s:
        return option
    try:
        return env.startup_timeout_s(option)
    except ValueError as error:
        raise ConfigError(
            f"ASYNCLLM_STARTUP_TIMEOUT_S must be a positive number of seconds: {error}", parameter="startup_timeout_s"
        ) from error
