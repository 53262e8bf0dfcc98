"""Hugging Face transformers: ``generate()`` in a worker thread; many requests are one static batch.

``options``: ``dtype``, float32 unless given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import driver


class TransformersDriver(driver.Driver):
    can_cancel = False

    async def start(self, settings: dict[str, Any]) -> None:
        begun = time.perf_counter()
        import torch
        import transformers

        self.import_s = time.perf_counter() - begun
        self.torch = torch
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings["options"].get("dtype", "float32"))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
        self.config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(self, prompts: list[list[int]], max_tokens: int, streamer: Any = None) -> list[list[int]]:
        ids = self.torch.tensor(prompts)  # equally long, so nothing is padded: the best case for generate()
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                generation_config=self.config,
                max_new_tokens=max_tokens,
                streamer=streamer,
            )
        return out[:, ids.shape[1] :].tolist()

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[int] | None] = asyncio.Queue()

        class Streamer:
            has_prompt = False

            def put(self, ids: Any) -> None:
                if self.has_prompt:
                    loop.call_soon_threadsafe(arrived.put_nowait, ids.tolist())
                self.has_prompt = True

            def end(self) -> None:
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        work = asyncio.create_task(asyncio.to_thread(self.generate, [prompt], max_tokens, Streamer()))
        work.add_done_callback(lambda _: arrived.put_nowait(None))  # also where it failed
        while (new := await arrived.get()) is not None:
            yield new
        await work

    async def batch(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        if len(prompts) == 1:
            return await super().batch(prompts, max_tokens)
        begun = time.perf_counter()
        return driver.at_once(begun, await asyncio.to_thread(self.generate, prompts, max_tokens))


if __name__ == "__main__":
    driver.main(TransformersDriver())
