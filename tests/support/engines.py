"""Engines without a model for tests of the process border: configurations, requests, and what to do with outputs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio

from asyncllm.client.async_mp import AsyncMPClient
from asyncllm.client.connection import EngineConnection
from asyncllm.client.sync_mp import SyncMPClient
from asyncllm.config import EngineConfig
from asyncllm.testing import scripted_options, write_tiny_checkpoint
from asyncllm.wire.messages import EngineCoreOutputs, EngineCoreRequest, EngineSampling
from tests.support import leaks

REPOSITORY = Path(__file__).resolve().parents[2]


def scripted_config(folder: Path, script: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    """Return the configuration of an engine that draws from a script, for ever 1, 2, 3 unless told otherwise."""
    path = write_tiny_checkpoint(folder)
    return EngineConfig.from_options(str(path), **scripted_options(**{"tokens": [1, 2, 3], **(script or {})}) | options)


def request(request_id: int, *, max_tokens: int = 4, prompt: list[int] | None = None) -> EngineCoreRequest:
    """Return a request of a short prompt that ends by length only."""
    return EngineCoreRequest(request_id, prompt or [72, 73], EngineSampling(max_tokens=max_tokens, ignore_eos=True))


async def collect(client: AsyncMPClient, num_requests: int) -> dict[int, list[int]]:
    """Receive until ``num_requests`` have finished; return the tokens of each."""
    tokens: dict[int, list[int]] = {}
    while num_requests:
        num_requests -= add_outputs(tokens, await client.recv())
    return tokens


def collect_sync(client: Any, num_requests: int) -> dict[int, list[int]]:
    """As :func:`collect`, from a blocking client."""
    tokens: dict[int, list[int]] = {}
    while num_requests:
        num_requests -= add_outputs(tokens, client.get_output())
    return tokens


def add_outputs(tokens: dict[int, list[int]], outputs: EngineCoreOutputs) -> int:
    """Add the new tokens of a step to ``tokens``; return how many requests it finished."""
    for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
        tokens.setdefault(request_id, []).append(token_id)
    return len(outputs.finished)


def connection_of(client: AsyncMPClient | SyncMPClient) -> EngineConnection:
    """Return what a started client hides."""
    connection = client._connection
    assert connection is not None
    return connection


@contextlib.asynccontextmanager
async def started(config: EngineConfig) -> AsyncIterator[AsyncMPClient]:
    """Yield a started client; closed on exit."""
    client = AsyncMPClient(config)
    await client.start()
    try:
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def reading(client: AsyncMPClient) -> AsyncIterator[None]:
    """Read and drop outputs in a task while the body runs, so that utility calls are answered."""

    async def read() -> None:
        while True:
            await client.recv()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        yield
        tasks.cancel_scope.cancel()


@contextlib.contextmanager
def started_sync(config: EngineConfig) -> Iterator[SyncMPClient]:
    """Yield a started blocking client; closed on exit."""
    client = SyncMPClient(config)
    client.start()
    try:
        yield client
    finally:
        client.close()


class Program:
    """A Python program of its own, as a user would run it; its engine's sockets are under ``runtime_dir``.

    ``line()`` waits for its next line of output. Killed on exit if it still runs.
    """

    def __init__(self, source: str, runtime_dir: Path, *args: str, **options: Any) -> None:
        self.runtime_dir = runtime_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ASYNCLLM_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": str(REPOSITORY)},
            **options,
        )

    def line(self) -> str:
        """Return the next line it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, timeout_s: float = 30.0) -> tuple[str, str]:
        """Wait for its end and return the rest of its output and what it wrote to stderr."""
        return self.process.communicate(timeout=timeout_s)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def seconds_until_gone(pid: int, *folders: Path, timeout_s: float = 10.0) -> float:
    """Return how long it took until ``pid`` ran no more and the folders were empty."""
    begin = time.monotonic()

    def gone() -> bool:
        return not leaks.process_lives(pid) and not any(any(folder.iterdir()) for folder in folders)

    assert leaks.wait_until(gone, timeout_s), f"{leaks.describe(pid)}; {[list(f.rglob('*')) for f in folders]}"
    return time.monotonic() - begin
