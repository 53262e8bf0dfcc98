"""One more line in a comparison of engines: the driver of asyncllm for a shared workload harness.

    python benchmarks/peers_driver.py --harness FOLDER --workload FOLDER/workload.json [--variant NAME] [--model FILE]

``FOLDER`` holds ``harness.py``, which defines ``Driver`` and ``main``; it gives every engine the same prompts (token
ids, greedy, end of sequence ignored), times them and prints one JSON line. As a block of its ``peers.toml``::

    [[run]]
    name = "asyncllm-fp32"
    python = "{peers}/asyncllm/bin/python"
    driver = "/path/to/asyncllm/benchmarks/peers_driver.py"
    args = ["--harness", "."]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import report


def import_harness() -> Any:
    """Import ``harness`` from the folder that ``--harness`` names, before the harness parses its own arguments."""
    found = argparse.ArgumentParser(add_help=False)
    found.add_argument("--harness", type=Path, default=Path())
    known, _ = found.parse_known_args()
    sys.path.insert(0, str(known.harness.resolve()))
    import harness

    return harness


harness = import_harness()


class AsyncLLMDriver(harness.Driver):
    """One asyncio task per request, through the public API."""

    name = "asyncllm"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--harness", type=Path, help="folder of harness.py")
        parser.add_argument("--model", help="default: the workload's own model folder")
        parser.add_argument("--dtype", default="auto")
        parser.add_argument("--max-num-seqs", type=int, default=64)
        parser.add_argument("--max-batched-tokens", type=int, default=1024)
        parser.add_argument("--num-threads", type=int)

    async def start(self, args: argparse.Namespace, workload: dict[str, Any]) -> None:
        begun = time.perf_counter()
        from asyncllm import AsyncLLM, SamplingParams

        self.import_s = time.perf_counter() - begun
        self.versions = {"asyncllm": report.commit() or version("asyncllm"), "torch": version("torch")}
        self.params = lambda max_tokens: SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm = AsyncLLM(
            args.model or workload["model"],
            dtype=args.dtype,
            max_model_len=workload["max_len"],
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_batched_tokens,
            num_threads=args.num_threads,
            enable_prefix_caching=False,  # the workload shares no prefixes; its repeats would be measured as hits
        )
        await self.llm.start()

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[tuple[int, str]]:
        async for delta in self.llm.stream(prompt, self.params(max_tokens)):
            yield len(delta.token_ids), delta.text

    async def cancel(self, prompt: list[int]) -> dict[str, float]:
        running = asyncio.Event()

        async def consume() -> None:
            seen = 0
            async for delta in self.llm.stream(prompt, self.params(512)):
                seen += len(delta.token_ids)
                if seen >= 16:
                    running.set()

        task = asyncio.create_task(consume())
        await running.wait()
        await asyncio.sleep(0.005)
        begun = time.perf_counter()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        caller_s = time.perf_counter() - begun
        # This call follows the abort through the same queue, so its answer means that the abort is done.
        stats = await self.llm.stats()
        freed_s = time.perf_counter() - begun
        if stats.num_running + stats.num_waiting:
            raise RuntimeError(f"the cancelled request is still there: {stats}")
        begun = time.perf_counter()
        await self.llm.stats()
        return {"caller_s": caller_s, "freed_s": freed_s, "idle_call_s": time.perf_counter() - begun}

    async def close(self) -> None:
        await self.llm.aclose()


if __name__ == "__main__":
    harness.main(AsyncLLMDriver())
