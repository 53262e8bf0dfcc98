"""The half of a comparison that runs in an engine's own interpreter: it answers each line on stdin with one on stdout.

Standard library only, so that it runs unchanged in every engine's virtual environment. The lines are JSON objects:

    settings                                → {"import_s", "versions", "memory"}  the engine is ready
    {"prompts": [[id …] …], "max_tokens"}   → {"wall_s", "samples": [{"begun_s", "at_s": [s …], "ids": [id …]} …]}
    {"cancel": [id …], "max_tokens"}        → {"caller_s", "freed_s"}, or null: this engine cannot
    (end of input)                            the engine is closed

``settings``: model, threads, max_model_len, max_num_seqs, kv_tokens (what the workload needs at once), and options,
which mean what the engine's own file says. Every request is greedy and goes on past the end of sequence.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

CANCEL_AFTER_TOKENS, CANCEL_TRIES = 16, 10


class Driver:
    """One engine. Subclasses set ``versions`` and ``import_s`` in :meth:`start`."""

    versions: dict[str, str]
    import_s = 0.0
    can_cancel = True

    async def start(self, settings: dict[str, Any]) -> None:
        """Import the engine and build it."""
        raise NotImplementedError

    def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        """Yield the new ids of one request as they come. Closing or cancelling it ends the request."""
        raise NotImplementedError

    async def batch(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Run all prompts at once and return when their tokens came; one task per request unless overridden."""
        return list(await asyncio.gather(*(collect(self.stream(prompt, max_tokens)) for prompt in prompts)))

    async def freed(self) -> None:
        """Wait until the engine has let go of a cancelled request."""
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        """Return bytes of the KV cache, where the workload fills all of them."""
        return {}

    async def close(self) -> None:
        """End the engine."""


async def collect(stream: AsyncIterator[list[int]]) -> dict[str, Any]:
    """Return the ids of ``stream`` and when each of them came."""
    begun, at_s, ids = time.perf_counter(), [], []
    async for new in stream:
        now = time.perf_counter()
        at_s += [now] * len(new)
        ids += new
    return {"begun_s": begun, "at_s": at_s, "ids": ids}


def at_once(begun: float, rows: list[list[int]]) -> list[dict[str, Any]]:
    """Return samples of a static batch: nobody sees a token before all are done."""
    now = time.perf_counter()
    return [{"begun_s": begun, "at_s": [now] * len(row), "ids": row} for row in rows]


async def cancel(driver: Driver, prompt: list[int], max_tokens: int) -> dict[str, float] | None:
    """Cancel the task of a running request: seconds until the caller is free, and until the engine has freed it."""
    if not driver.can_cancel:
        return None
    for _ in range(CANCEL_TRIES):
        running = asyncio.Event()
        task = asyncio.create_task(consume(driver.stream(prompt, max_tokens), running))
        await running.wait()
        await asyncio.sleep(0.002)  # somewhere inside a step, not at its edge
        if task.done():  # a small model, and this process did not get its turn in time
            continue
        begun = time.perf_counter()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        caller_s = time.perf_counter() - begun
        await driver.freed()
        return {"caller_s": caller_s, "freed_s": time.perf_counter() - begun}
    raise RuntimeError(f"{max_tokens} tokens were done before the request could be cancelled, {CANCEL_TRIES} times")


async def consume(stream: AsyncIterator[list[int]], running: asyncio.Event) -> None:
    """Read ``stream``; say when some of it has come."""
    seen = 0
    async for new in stream:
        seen += len(new)
        if seen >= CANCEL_AFTER_TOKENS:
            running.set()


async def answer(driver: Driver, asked: dict[str, Any]) -> dict[str, Any] | None:
    if "cancel" in asked:
        return await cancel(driver, asked["cancel"], asked["max_tokens"])
    begun = time.perf_counter()
    samples = await driver.batch(asked["prompts"], asked["max_tokens"])
    wall_s = time.perf_counter() - begun
    for sample in samples:
        sample["at_s"] = [round(at - begun, 6) for at in sample["at_s"]]
        sample["begun_s"] = round(sample["begun_s"] - begun, 6)
    return {"wall_s": wall_s, "samples": samples}


async def serve(driver: Driver, tell: Any) -> None:
    async def ask() -> Any:
        line = await asyncio.to_thread(sys.stdin.readline)
        return json.loads(line) if line else None

    await driver.start(await ask())
    tell({"import_s": driver.import_s, "versions": driver.versions, "memory": driver.memory()})
    while (asked := await ask()) is not None:
        tell(await answer(driver, asked))
    await driver.close()


def main(driver: Driver) -> None:
    """Serve ``driver`` until stdin ends. What libraries print to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    asyncio.run(serve(driver, tell))
