"""Sending from anywhere, without waiting and in order; and what a connection says of an engine's end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm.client.connection import EngineConnection, describe_exit
from asyncllm.errors import EngineDeadError
from asyncllm.wire.codec import input_decoder
from asyncllm.wire.messages import AbortRequests
from tests.support.engines import request, scripted_config

pytestmark = pytest.mark.usefixtures("no_leaks")


class Socket:
    """Stands for the PUSH socket: keeps frames, and may call back in the middle of a send."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.during_send = lambda: None

    def send(self, frame: bytes, flags: int) -> None:
        during_send, self.during_send = self.during_send, lambda: None
        during_send()
        self.frames.append(frame)

    def ids(self) -> list[int]:
        decode = input_decoder()
        messages = [decode(frame) for frame in self.frames]
        return [i for message in messages if isinstance(message, AbortRequests) for i in message.request_ids]


@pytest.fixture
def connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConnection]:
    connection = EngineConnection(scripted_config(tmp_path))
    real = connection.process.sockets.to_engine
    connection.process.sockets.to_engine = Socket()  # type: ignore[assignment]
    yield connection
    connection.process.sockets.to_engine = real
    connection.close(grace_s=0)


def socket_of(connection: EngineConnection) -> Socket:
    socket = connection.process.sockets.to_engine
    assert isinstance(socket, Socket)
    return socket


def test_send_within_a_send_neither_waits_nor_overtakes(connection: EngineConnection) -> None:
    """A ``__del__`` or a signal handler may run inside another send of its own thread."""
    socket = socket_of(connection)
    socket.during_send = lambda: connection.send(AbortRequests([2]))
    connection.send(AbortRequests([1]))
    assert socket.ids() == [1, 2]


def test_send_of_another_thread_is_taken_along(connection: EngineConnection) -> None:
    socket = socket_of(connection)

    def from_another_thread() -> None:
        thread = threading.Thread(target=connection.send, args=(AbortRequests([2]),))
        thread.start()
        thread.join()  # it returned though the socket is taken

    socket.during_send = from_another_thread
    connection.send(AbortRequests([1]))
    assert socket.ids() == [1, 2]


def test_message_that_cannot_be_encoded_does_not_stop_the_next(connection: EngineConnection) -> None:
    with pytest.raises(OverflowError):
        connection.send(request(1, prompt=[2**64]))
    connection.send(AbortRequests([3]))
    assert socket_of(connection).ids() == [3]


def test_message_waits_until_the_engine_is_connected(tmp_path: Path) -> None:
    connection = EngineConnection(scripted_config(tmp_path))
    connection.send(AbortRequests([1]))  # the process has hardly begun
    assert len(connection._unsent) == 1
    connection.close(grace_s=0)
    connection.send(AbortRequests([2]))
    assert not connection._unsent
    with pytest.raises(EngineDeadError, match="closed"):
        connection.raise_if_gone()


def test_finalizer_does_not_keep_the_client_alive(tmp_path: Path) -> None:
    from asyncllm.client.sync_mp import SyncMPClient

    client = SyncMPClient(scripted_config(tmp_path))
    client.start()
    alive = weakref.ref(client)
    del client
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (None, "ended with an unknown exit code"),
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-11, "was killed by SIGSEGV"),
        (-200, "was killed by signal 200"),
    ],
)
def test_b47_exit_codes_in_words(exit_code: int | None, words: str) -> None:
    assert describe_exit(exit_code) == words
