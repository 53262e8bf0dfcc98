"""What does `async_scheduling` change on this machine: steps launched before the ids of the one before have arrived?

    python benchmarks/async_scheduling.py [--model FILE] [--streams 1 8 32] [--tokens 128] [--rounds 5]

Two engines that differ in this option alone, in alternating rounds; each round is so many streams of so many tokens
through `AsyncLLM`. "tokens_per_s" is that of the best round and of the median one, "cpu_ms_per_step" the processor time
of the engine's process per step (best), which holds where other work disturbs the clock on the wall.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import report

from asyncllm import AsyncLLM

MODES = (False, True)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process and all its threads have taken, in seconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")  # nanoseconds, where stat counts in ticks of 10 ms
    return sum(int(file.read_text(encoding="utf-8").split()[0]) for file in threads) / 1e9


async def one_round(llm: AsyncLLM, streams: int, num_tokens: int) -> tuple[float, float]:
    """Return tokens per second, and the engine's processor time per step in milliseconds."""
    prompts = [[5 + index % 200] * 16 for index in range(streams)]
    pid = llm.info.pid
    steps, spent, begun = (await llm.stats()).num_steps, cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(llm.generate(prompt, max_tokens=num_tokens, ignore_eos=True) for prompt in prompts))
    seconds, spent = time.perf_counter() - begun, cpu_s(pid) - spent
    return streams * num_tokens / seconds, 1e3 * spent / ((await llm.stats()).num_steps - steps)


async def measure(args: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    options = {"max_num_seqs": max(args.streams), **report.options(args.option)}
    async with (
        AsyncLLM(args.model, async_scheduling=False, **options) as off,
        AsyncLLM(args.model, async_scheduling=True, **options) as on,
    ):
        engines = dict(zip(MODES, (off, on), strict=True))
        for streams in args.streams:
            rates: dict[bool, list[float]] = {mode: [] for mode in MODES}
            costs: dict[bool, list[float]] = {mode: [] for mode in MODES}
            for index in range(args.rounds + 1):
                for mode in MODES if index % 2 else MODES[::-1]:
                    rate, cost = await one_round(engines[mode], streams, args.tokens)
                    if index:  # the first warms up
                        rates[mode].append(rate)
                        costs[mode].append(cost)
            figures[f"streams_{streams}"] = {
                "on" if mode else "off": {
                    "tokens_per_s": round(max(rates[mode]), 1),
                    "median": round(report.quantile(rates[mode], 0.5), 1),
                    "cpu_ms_per_step": round(min(costs[mode]), 3),
                }
                for mode in MODES
            } | {"gain": round(max(rates[True]) / max(rates[False]), 3)}
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--option", default="", help="NAME=VALUE,...: more engine options for both")
    args = parser.parse_args()
    report.emit("async_scheduling", asyncio.run(measure(args)), args)


if __name__ == "__main__":
    main()
