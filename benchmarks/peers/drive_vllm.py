"""vLLM on a CPU through its AsyncLLM, one task per request.

``options`` are those of ``AsyncEngineArgs``: ``dtype`` is float32 unless given, ``enforce_eager`` does without
torch.compile.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import Any

import driver


class VllmDriver(driver.Driver):
    async def start(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, whole ones only
        # Its own choice keeps one core for the front end, which on two cores is half of the machine.
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        begun = time.perf_counter()
        import vllm
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.async_llm import AsyncLLM

        self.import_s = time.perf_counter() - begun
        import torch

        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self.params = lambda max_tokens: SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        options = {
            "dtype": "float32",
            "max_model_len": settings["max_model_len"],
            "max_num_seqs": settings["max_num_seqs"],
            "disable_log_stats": True,
        }
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(settings["model"], **options | settings["options"]))
        self.num_requests = 0

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        async for output in self.llm.generate({"prompt_token_ids": prompt}, self.params(max_tokens), name):
            yield list(output.outputs[0].token_ids)

    async def freed(self) -> None:
        await self.llm.is_sleeping()  # a call that follows the abort through the same queue

    async def close(self) -> None:
        self.llm.shutdown()


if __name__ == "__main__":
    driver.main(VllmDriver())
