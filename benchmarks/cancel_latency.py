"""How long until a cancelled caller is free, and until the engine has given the request's blocks back?

    python benchmarks/cancel_latency.py [--model FILE] [--rounds 20]

One request decodes; after 16 tokens, at a moment that does not depend on the step, its task is cancelled. "caller":
from `task.cancel()` until the task has ended. "freed": until a call into the engine that was sent after the abort
returns with all blocks free; a call is answered between two steps, so it is done when the running step is.
"idle_call" is what such a call costs alone, "step" the time of one decode step here: the bound of "freed" is one step
and one call.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import report

from asyncllm import AsyncLLM

PROMPT = "Write a long story about the sea, the harbour and the lighthouse."


async def one_round(llm: AsyncLLM, total_blocks: int, delay_s: float) -> dict[str, float]:
    arrivals: list[float] = []
    running = asyncio.Event()

    async def consume() -> None:
        async for _ in llm.stream(PROMPT, max_tokens=512, ignore_eos=True, temperature=0):
            arrivals.append(time.perf_counter())
            if len(arrivals) == 16:
                running.set()

    task = asyncio.create_task(consume())
    await running.wait()
    await asyncio.sleep(delay_s)
    begun = time.perf_counter()
    task.cancel()
    await asyncio.wait([task])
    caller_s = time.perf_counter() - begun
    calls = 1
    while (await llm.stats()).num_free_blocks != total_blocks:
        calls += 1
    freed_s = time.perf_counter() - begun
    begun = time.perf_counter()
    await llm.stats()
    idle_call_s = time.perf_counter() - begun
    step_s = (arrivals[-1] - arrivals[4]) / (len(arrivals) - 5)
    return {"caller": caller_s, "freed": freed_s, "calls": calls, "idle_call": idle_call_s, "step": step_s}


async def measure(args: Any) -> dict[str, Any]:
    random.seed(0)
    async with AsyncLLM(args.model) as llm:
        total_blocks = llm.info.num_blocks
        rounds = [await one_round(llm, total_blocks, random.uniform(0.0, 0.05)) for _ in range(args.rounds + 1)][1:]
    figures = {f"{name}_ms": report.spread([r[name] * 1e3 for r in rounds]) for name in rounds[0] if name != "calls"}
    figures["rounds_freed_by_the_first_call"] = sum(r["calls"] == 1 for r in rounds) / len(rounds)
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    report.emit("cancel_latency", asyncio.run(measure(args)), args)


if __name__ == "__main__":
    main()
