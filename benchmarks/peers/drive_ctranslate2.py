"""CTranslate2's Generator. It has no continuous batching: many requests are one static ``generate_batch`` call.

``model`` is a Hugging Face folder, which a child process converts first; the time to ready includes that.
``options``: ``compute_type``, int8 unless given.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import driver

CONVERT = """
import sys
from ctranslate2.converters import TransformersConverter
TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3], force=True)
"""


class Ctranslate2Driver(driver.Driver):
    can_cancel = False

    async def start(self, settings: dict[str, Any]) -> None:
        await asyncio.to_thread(self.build, settings)

    def build(self, settings: dict[str, Any]) -> None:
        begun = time.perf_counter()
        import ctranslate2

        self.import_s = time.perf_counter() - begun
        compute_type = settings["options"].get("compute_type", "int8")
        vocabulary = json.loads(Path(settings["model"], "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        self.tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-c", CONVERT, settings["model"], folder, compute_type], check=True)
            self.generator = ctranslate2.Generator(
                folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=settings["threads"]
            )
        self.versions = {"ctranslate2": ctranslate2.__version__, "compute_type": self.generator.compute_type}

    def generate(self, prompts: list[list[int]], max_tokens: int, callback: Any = None) -> list[list[int]]:
        results = self.generator.generate_batch(
            [[self.tokens[token_id] for token_id in prompt] for prompt in prompts],
            max_batch_size=len(prompts),
            max_length=max_tokens,
            min_length=max_tokens,
            beam_size=1,
            sampling_topk=1,
            end_token=[],
            include_prompt_in_result=False,
            callback=callback,
        )
        return [result.sequences_ids[0] for result in results]

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[int] | None] = asyncio.Queue()

        def on_token(step: Any) -> bool:
            loop.call_soon_threadsafe(arrived.put_nowait, [step.token_id])
            return False

        work = asyncio.create_task(asyncio.to_thread(self.generate, [prompt], max_tokens, on_token))
        work.add_done_callback(lambda _: arrived.put_nowait(None))
        while (new := await arrived.get()) is not None:
            yield new
        await work

    async def batch(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        if len(prompts) == 1:
            return await super().batch(prompts, max_tokens)
        begun = time.perf_counter()
        return driver.at_once(begun, await asyncio.to_thread(self.generate, prompts, max_tokens))


if __name__ == "__main__":
    driver.main(Ctranslate2Driver())
