"""The engine process: ``python -m asyncllm.core.engine_core_proc <private folder> <parent pid> <death descriptor>``.

Two threads: the busy loop, which also encodes and decodes (zmq reads and writes in a thread of its own, without the
GIL), and the watch on the parent, which starts before anything heavy is imported. The loop blocks while there is
nothing to do. Invariant: the caller hears of this process's end, with its cause where there was time to tell it.
"""

from __future__ import annotations

import os
import sys

from asyncllm.core.parent_watch import ParentWatch

if __name__ == "__main__":
    _WATCH = ParentWatch(parent_pid=int(sys.argv[2]), runtime_dir=sys.argv[1])

import contextlib
import faulthandler
import logging
import signal
import time
import traceback
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from asyncllm import env
from asyncllm.config import EngineConfig
from asyncllm.core.engine_core import EngineCore
from asyncllm.errors import EngineDeadError, UtilityError, describe_error
from asyncllm.wire.codec import input_decoder, make_encoder
from asyncllm.wire.endpoints import ENDPOINTS_FILE, Endpoints
from asyncllm.wire.messages import (
    Configure,
    EngineCoreOutputs,
    EngineDied,
    EngineOutput,
    EngineReady,
    Shutdown,
    StartupFailed,
    StartupProgress,
    UtilityCall,
    UtilityResult,
)

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["EngineCoreProc", "main"]

logger = logging.getLogger(__name__)

HELLO_INTERVAL_MS = 50
LAST_WORDS_MS = 1000
"""How long the end of the process may wait for its last message to be taken."""
POLLIN = int(zmq.POLLIN)
SHUTDOWN = "shutdown"
"""The reason to stop that the caller gave, and so needs no telling."""


LOW_PRIORITY = 10
"""Added to the niceness: the engine gets about a tenth of a core that the application wants too."""


class Stopped(Exception):
    """The process is to end now: SIGTERM, or the parent is dead."""


class EngineCoreProc:
    """The busy loop and its two sockets. Made and used by the process's main thread."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inputs = _connect(self._context, zmq.PULL, endpoints.to_engine, endpoints)
        self._outputs = _connect(self._context, zmq.PUSH, endpoints.from_engine, endpoints)
        self._encode = make_encoder()
        self._decode = input_decoder()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._inputs, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._calls: deque[UtilityCall] = deque()
        self._answered: deque[tuple[UtilityCall, Future[Any]]] = deque()
        self._stop_reason: str | None = None
        self._phase = "configure"

    # ----------------------------------------------------------------------------------------- the life of a process
    def run(self) -> int:
        """Start the engine, serve until told to end, and return the exit code."""
        try:
            core = self._start()
        except Stopped as stopped:
            logger.info("stopped while starting: %s", stopped)
            return 0
        except BaseException as error:
            logger.exception("the start failed in phase %s", self._phase)
            self._send(StartupFailed(describe_error(error), self._phase))
            return 1
        try:
            self._serve(core)
        except BaseException as error:
            logger.exception("the busy loop failed")
            self._send(EngineDied(describe_error(error)))
            return 1
        finally:
            with contextlib.suppress(Exception):
                core.shutdown()
        return 0

    def stop(self, reason: str) -> None:
        """End the loop after the step that is running. From any thread or signal handler."""
        self._stop_reason = reason
        self._wake()

    def stop_on(self, signal_number: signal.Signals) -> None:
        """Make that signal end the loop after the step that is running; also an idle loop, or one not yet begun."""

        def handle(signal_number: int, frame: object) -> None:
            self.stop(signal.Signals(signal_number).name)

        signal.signal(signal_number, handle)

    def close(self, last_words_ms: int) -> None:
        """Close the sockets once what was sent is taken, at most after ``last_words_ms``."""
        self._context.destroy(linger=last_words_ms)

    def _start(self) -> EngineCore:
        config = self._receive_config()
        if config.device.share_cores:
            give_way()
        started = time.monotonic()
        core = EngineCore(config, self._report, self._wake)
        seconds = {**core.info.phase_to_seconds, "engine": time.monotonic() - started}
        self._raise_if_stopped()
        self._send(EngineReady(msgspec.structs.replace(core.info, phase_to_seconds=seconds)))
        logger.info("ready: %s", core.info)
        return core

    def _receive_config(self) -> EngineConfig:
        """Say hello until the configuration comes: the caller answers as soon as both connections stand."""
        while not self._inputs.poll(HELLO_INTERVAL_MS):
            self._raise_if_stopped()
            self._send(StartupProgress("hello"))
        message = self._decode(self._inputs.recv())
        if not isinstance(message, Configure):
            raise Stopped(f"the first message is a {type(message).__name__}")
        return msgspec.convert(message.config, EngineConfig)

    def _report(self, phase: str, fraction: float | None) -> None:
        self._raise_if_stopped()
        self._phase = phase
        self._send(StartupProgress(phase, fraction))

    def _raise_if_stopped(self) -> None:
        if self._stop_reason is not None:
            raise Stopped(self._stop_reason)

    # ------------------------------------------------------------------------------------------------ the busy loop
    def _serve(self, core: EngineCore) -> None:
        def take_inputs() -> None:
            self._take_inputs(core)

        while self._stop_reason is None:
            outputs = core.step(take_inputs)
            if outputs is not None:
                self._send_outputs(outputs)
            elif not (self._calls or self._answered):
                self._wait()
                self._take_inputs(core)
                continue  # the answers to requests that came before a call are sent before the call's own
            if self._calls or self._answered:
                self._run_calls(core)
        if self._stop_reason != SHUTDOWN:
            reason = EngineDeadError(f"the engine process was stopped: {self._stop_reason}")
            self._send(EngineDied(describe_error(reason)))

    def _take_inputs(self, core: EngineCore) -> None:
        """Take in all that has arrived; utility calls are kept until the step that is running has ended.

        Asking for the socket's state costs half of a ``recv`` that finds nothing.
        """
        while self._inputs.getsockopt(zmq.EVENTS) & POLLIN:  # pyright: ignore[reportOperatorIssue]
            message = self._decode(self._inputs.recv(zmq.NOBLOCK))
            if isinstance(message, UtilityCall):
                self._calls.append(message)
            elif isinstance(message, Shutdown):
                self._stop_reason = SHUTDOWN
            elif not isinstance(message, Configure):
                core.apply(message)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.request_ids or outputs.finished or outputs.prompt_logprobs:
            self._send(outputs)

    def _send(self, message: EngineOutput) -> None:
        self._outputs.send(self._encode(message), zmq.NOBLOCK)

    # --------------------------------------------------------------------------------------------------- utilities
    def _run_calls(self, core: EngineCore) -> None:
        while self._calls:
            call = self._calls.popleft()
            try:
                value = core.call(call.method, call.args)
            except Exception as error:
                self._send(UtilityResult(call.call_id, error=describe_error(error)))
                continue
            if isinstance(value, Future):
                self._answer_later(call, cast("Future[Any]", value))
            else:
                self._answer(call, value)
        while self._answered:
            call, future = self._answered.popleft()
            error = (
                future.exception() if not future.cancelled() else UtilityError("the engine ends", method=call.method)
            )
            if error is None:
                self._answer(call, future.result())
            else:
                self._send(UtilityResult(call.call_id, error=describe_error(error)))

    def _answer_later(self, call: UtilityCall, future: Future[Any]) -> None:
        def done(future: Future[Any]) -> None:  # in whichever thread completes it
            self._answered.append((call, future))
            self._wake()

        future.add_done_callback(done)

    def _answer(self, call: UtilityCall, value: Any) -> None:
        try:
            self._send(UtilityResult(call.call_id, value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            refusal = UtilityError(f"the value of {call.method!r} is not plain data: {error}", method=call.method)
            self._send(UtilityResult(call.call_id, error=describe_error(refusal)))

    # ------------------------------------------------------------------------------------------------------ waking
    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake
            os.write(self._wake_write, b"\0")

    def _wait(self) -> None:
        """Block until something arrived or somebody called :meth:`_wake`."""
        if self._calls or self._answered:
            return
        self._poller.poll()
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


def give_way() -> None:
    """Lower the priority of this thread and of all that it starts later, which is before any of them works."""
    os.nice(LOW_PRIORITY)
    # Where Linux weighs sessions against each other, niceness counts within one only, and this process leads its own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LOW_PRIORITY))


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, endpoints: Endpoints
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)
    if endpoints.server_public_key and endpoints.public_key and endpoints.secret_key:
        socket.curve_serverkey = endpoints.server_public_key
        socket.curve_publickey = endpoints.public_key
        socket.curve_secretkey = endpoints.secret_key
    socket.connect(address)
    return socket


def _keep_from_children(fd: int) -> None:
    """Let no child process hold ``fd``: its last copy closing tells the caller that this process has ended."""
    os.set_inheritable(fd, False)

    def close() -> None:
        with contextlib.suppress(OSError):
            os.close(fd)

    os.register_at_fork(after_in_child=close)


@contextlib.contextmanager
def _log_to_stderr() -> Generator[None]:
    faulthandler.enable()
    logging.basicConfig(level=env.log_level(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        yield
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def main(watch: ParentWatch) -> None:
    """Run the engine process that ``sys.argv`` describes; does not return."""
    folder, death_fd = Path(sys.argv[1]), int(sys.argv[3])
    _keep_from_children(death_fd)
    env.restore_pythonpath()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    exit_code = 1
    try:
        with _log_to_stderr():
            endpoints = msgspec.msgpack.decode((folder / ENDPOINTS_FILE).read_bytes(), type=Endpoints)
            process = EngineCoreProc(endpoints)
            process.stop_on(signal.SIGTERM)
            watch.on_orphaned(lambda: process.stop("the parent process is dead"))
            exit_code = process.run()
            process.close(0 if watch.is_orphaned else LAST_WORDS_MS)
    except BaseException:
        traceback.print_exc()
    finally:
        watch.exit(exit_code)


if __name__ == "__main__":
    main(_WATCH)  # pyright: ignore[reportPossiblyUnboundVariable]  (bound at the top, on the same condition)
