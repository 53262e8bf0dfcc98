"""asyncllm through its public API, one task per request. ``options`` are those of ``AsyncLLM``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import driver


class AsyncLLMDriver(driver.Driver):
    async def start(self, settings: dict[str, Any]) -> None:
        begun = time.perf_counter()
        from asyncllm import AsyncLLM, SamplingParams

        self.import_s = time.perf_counter() - begun
        self.params = lambda max_tokens: SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        block_size = 16
        options = {
            "max_model_len": settings["max_model_len"],
            "max_num_seqs": settings["max_num_seqs"],
            "num_threads": settings["threads"],
            "block_size": block_size,
            # One more block per request than its tokens fill: the last one of each is rarely full.
            "num_blocks": settings["kv_tokens"] // block_size + settings["max_num_seqs"] + 1,
        }
        self.llm = AsyncLLM(settings["model"], **options | settings["options"])
        await self.llm.start()
        self.versions = {"torch": version("torch"), "kernels": self.llm.info.kernels}

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        async for delta in self.llm.stream(prompt, self.params(max_tokens)):
            yield delta.token_ids

    async def freed(self) -> None:
        stats = await self.llm.stats()  # follows the abort through the same queue, so its answer means that it is done
        if stats.num_running + stats.num_waiting:
            raise RuntimeError(f"the cancelled request is still there: {stats}")

    def memory(self) -> dict[str, int]:
        return {"kv_cache": self.llm.info.kv_cache_bytes}

    async def close(self) -> None:
        await self.llm.aclose()


if __name__ == "__main__":
    driver.main(AsyncLLMDriver())
