"""How much memory does a sleeping engine give back, and how long does it take to wake up?

    python benchmarks/sleep.py [--model FILE] [--tokens 8192] [--option NAME=VALUE,...]

The KV blocks of so many tokens are filled first. Memory is what the engine's process holds for itself ("Anonymous" of
the kernel's own count, so no mapped file), awake, asleep at level 1 and 2, and awake again after either.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import report

from asyncllm import AsyncLLM

PROMPT_TOKENS = 256


def anonymous_mib(pid: int) -> float:
    """Return the memory that a process holds for itself, in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Anonymous:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError("the kernel does not say")


async def fill(llm: AsyncLLM, num_tokens: int) -> None:
    """Use the KV blocks of ``num_tokens`` tokens."""
    ids = range(llm.info.vocab_size // 4, llm.info.vocab_size * 3 // 4)  # no special tokens
    prompts = [[ids[number], *ids[1:PROMPT_TOKENS]] for number in range(num_tokens // PROMPT_TOKENS)]
    async for _ in llm.map(prompts, max_tokens=1, temperature=0.0):
        pass


async def measure(args: Any) -> dict[str, Any]:
    options = {"block_size": 16, "num_blocks": args.tokens // 16 + 64, **report.options(args.option)}
    async with AsyncLLM(args.model, **options) as llm:
        pid = llm.info.pid
        figures: dict[str, Any] = {}
        for level in (1, 2):
            await fill(llm, args.tokens)
            awake = anonymous_mib(pid)
            await llm.sleep(level)
            asleep = anonymous_mib(pid)
            begun = time.perf_counter()
            await llm.wake_up()
            seconds = time.perf_counter() - begun
            figures[f"level_{level}"] = {"awake_mib": awake, "asleep_mib": asleep, "wake_up_s": round(seconds, 3)}
        return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens whose KV blocks are in use")
    parser.add_argument("--option", default="", help="NAME=VALUE,...: engine options")
    args = parser.parse_args()
    report.emit("sleep", asyncio.run(measure(args)), args)


if __name__ == "__main__":
    main()
