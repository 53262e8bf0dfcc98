"""What does an engine at work take from an application that needs the same cores, with `share_cores` and without?

    python benchmarks/shared_cores.py [--model FILE] [--seconds 5] [--streams 8]

The application is one busy process per core (sums of squares, counted) and an event loop with a 5 ms timer.
"application" is its speed while the engine streams, as a share of its speed alone; "timer_late_ms" by how much the
timer was late; "tokens_per_s" what the engine got done meanwhile, "alone" what it does on idle cores.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import report

from asyncllm import AsyncLLM

PERIOD_S = 0.005


def keep_busy(rounds: Synchronized[int]) -> None:
    while True:
        sum(i * i for i in range(1000))
        rounds.value += 1


class Application:
    """A process per core that counts its own rounds."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.counters = [context.Value("q", 0) for _ in os.sched_getaffinity(0)]
        self.processes = [context.Process(target=keep_busy, args=(counter,), daemon=True) for counter in self.counters]

    def __enter__(self) -> Application:
        for process in self.processes:
            process.start()
        while not all(counter.value for counter in self.counters):
            time.sleep(0.01)
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    async def rounds_per_s(self, seconds: float, late: list[float]) -> float:
        """Return the speed over ``seconds``; add how late each tick of a timer was, in seconds."""
        begun, before = time.perf_counter(), sum(counter.value for counter in self.counters)
        while (now := time.perf_counter()) < begun + seconds:
            await asyncio.sleep(PERIOD_S)
            late.append(time.perf_counter() - now - PERIOD_S)
        return (sum(counter.value for counter in self.counters) - before) / (time.perf_counter() - begun)


class Flood:
    """Keeps some requests running until it is cancelled, and counts their tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.running = asyncio.Event()

    async def run(self, llm: AsyncLLM, streams: int) -> None:
        await asyncio.gather(*(self._one(llm, [index + 5] * 32) for index in range(streams)))

    async def _one(self, llm: AsyncLLM, prompt: list[int]) -> None:
        while True:
            async with llm.stream(prompt, temperature=0, max_tokens=256, ignore_eos=True) as stream:
                async for delta in stream:
                    self.tokens += len(delta.token_ids)
                    self.running.set()


async def tokens_per_s(llm: AsyncLLM, args: Any, meanwhile: Any) -> tuple[float, Any]:
    """Return how fast the engine was while ``meanwhile`` was awaited, and what that gave."""
    flood = Flood()
    task = asyncio.create_task(flood.run(llm, args.streams))
    await flood.running.wait()
    begun, before = time.perf_counter(), flood.tokens
    result = await meanwhile
    rate = (flood.tokens - before) / (time.perf_counter() - begun)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return rate, result


async def measure(args: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for share_cores in (False, True):
        late: list[float] = []
        async with AsyncLLM(args.model, share_cores=share_cores) as llm:
            alone, _ = await tokens_per_s(llm, args, asyncio.sleep(args.seconds))
            with Application() as application:
                before = await application.rounds_per_s(args.seconds, [])
                rate, during = await tokens_per_s(llm, args, application.rounds_per_s(args.seconds, late))
        figures["shared" if share_cores else "default"] = {
            "application": round(during / before, 3),
            "timer_late_ms": {
                "median": round(report.quantile(late, 0.5) * 1e3, 2),
                "p99": round(report.quantile(late, 0.99) * 1e3, 2),
            },
            "tokens_per_s": round(rate, 1),
            "alone": round(alone, 1),
        }
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=8)
    args = parser.parse_args()
    report.emit("shared_cores", asyncio.run(measure(args)), args)


if __name__ == "__main__":
    main()
