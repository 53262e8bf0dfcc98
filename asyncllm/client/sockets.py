"""The caller's two sockets to one engine process, and one descriptor that tells when there is something to read.

Sending and receiving never block: no high-water marks, ``NOBLOCK`` always. Invariant: nobody but the engine process
that was started for them can connect: ipc sockets lie in a private folder, TCP sockets (loopback, where ipc is missing
or the path too long for it) demand a CURVE key that is written only there.
"""

from __future__ import annotations

import os
import select
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from asyncllm.wire.endpoints import Endpoints

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["EngineSockets", "Readiness", "bind_sockets"]

MAX_IPC_PATH = 100
"""``sun_path`` holds 108 bytes on Linux, 104 on macOS."""
NUM_DESCRIPTORS = 20
"""What an engine takes in this process, sockets, pipes and those of its start, is fewer."""


@dataclass
class EngineSockets:
    """The bound sockets. ``to_engine``: any thread, under a lock; ``from_engine`` and ``monitor``: the one reader."""

    context: zmq.Context[zmq.Socket[bytes]]
    to_engine: zmq.Socket[bytes]
    from_engine: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    """Receives one event when the engine's connection has ended and all it sent has been read."""

    def close(self) -> None:
        """Close them at once; what was not sent is dropped."""
        self.from_engine.disable_monitor()
        self.context.destroy(linger=0)


def bind_sockets(folder: Path) -> tuple[EngineSockets, Endpoints]:
    """Return bound sockets, and what the engine process needs to connect to them.

    :raises OSError: too few descriptors are left.
    :raises zmq.ZMQError: an address cannot be taken.
    """
    _require_descriptors()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        to_engine = context.socket(zmq.PUSH)
        from_engine = context.socket(zmq.PULL)
        to_engine.set_hwm(0)
        from_engine.set_hwm(0)
        monitor = from_engine.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if zmq.has("ipc") and len(bytes(folder / "out")) <= MAX_IPC_PATH:
            endpoints = Endpoints(f"ipc://{folder / 'in'}", f"ipc://{folder / 'out'}")
            to_engine.bind(endpoints.to_engine)
            from_engine.bind(endpoints.from_engine)
        else:
            endpoints = _bind_tcp(to_engine, from_engine)
    except BaseException:
        context.destroy(linger=0)
        raise
    return EngineSockets(context, to_engine, from_engine, monitor), endpoints


def _require_descriptors() -> None:
    """Return if enough descriptors are free: libzmq ends the whole process where it finds none.

    :raises OSError: they are not.
    """
    taken: list[int] = []
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        while len(taken) < NUM_DESCRIPTORS:
            taken.append(os.dup(taken[0]))
    finally:
        for fd in taken:
            os.close(fd)


def _bind_tcp(to_engine: zmq.Socket[bytes], from_engine: zmq.Socket[bytes]) -> Endpoints:
    server_public, server_secret = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    ports: list[int] = []
    for socket in (to_engine, from_engine):
        socket.curve_server = True
        socket.curve_secretkey = server_secret
        ports.append(socket.bind_to_random_port("tcp://127.0.0.1"))
    return Endpoints(f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", server_public, public, secret)


class Readiness:
    """One descriptor that is readable while any of ``fds`` is, so that a reader waits on a single one.

    An epoll (Linux) or kqueue (BSD, macOS) descriptor; event loops can wait on either.
    """

    if sys.platform == "linux":

        def __init__(self, fds: Iterable[int]) -> None:
            self._set = select.epoll()
            for fd in fds:
                self._set.register(fd, select.EPOLLIN)

        def wait(self, timeout_s: float | None = None) -> None:
            """Block until one is readable, at most ``timeout_s``."""
            self._set.poll(timeout_s)

    else:

        def __init__(self, fds: Iterable[int]) -> None:
            self._set = select.kqueue()
            self._set.control([select.kevent(fd, select.KQ_FILTER_READ) for fd in fds], 0)

        def wait(self, timeout_s: float | None = None) -> None:
            """Block until one is readable, at most ``timeout_s``."""
            self._set.control(None, 1, timeout_s)

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return -1 if self._set.closed else self._set.fileno()

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._set.close()
