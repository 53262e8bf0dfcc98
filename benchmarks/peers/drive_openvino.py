"""OpenVINO GenAI's continuous batching pipeline: a thread runs its steps, each task reads its own handle.

It has no asyncio interface. ``model`` is a .gguf file or the folder of an OpenVINO export; ``options`` are properties
of the CPU plugin such as INFERENCE_PRECISION_HINT.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import driver


class OpenvinoDriver(driver.Driver):
    async def start(self, settings: dict[str, Any]) -> None:
        begun = time.perf_counter()
        import openvino
        import openvino_genai

        self.import_s = time.perf_counter() - begun
        self.openvino, self.genai = openvino, openvino_genai
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GiB
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = 1024
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]} | settings["options"]
        self.pipe = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self.num_requests = 0
        self.live: dict[int, tuple[Any, asyncio.Queue[Any]]] = {}
        self.stopping = False
        self.loop = asyncio.get_running_loop()
        self.wake = threading.Condition()
        self.idle = asyncio.Event()
        self.worker = threading.Thread(target=self.work, daemon=True)
        self.worker.start()

    def work(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.live or self.stopping or self.pipe.has_non_finished_requests())
                if self.stopping:
                    return
            self.pipe.step()  # also what lets go of a cancelled request's blocks
            for name, (handle, queue) in list(self.live.items()):
                ids = []
                while handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
                if ids:
                    self.tell(queue.put_nowait, ids)
                if handle.get_status() != self.genai.GenerationStatus.RUNNING:
                    with self.wake:
                        del self.live[name]
                    self.tell(queue.put_nowait, None)
            if not self.live and not self.pipe.has_non_finished_requests():
                self.tell(self.idle.set)

    def tell(self, function: Any, *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *values)

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        import numpy as np

        config = self.genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.idle.clear()
        with self.wake:
            self.num_requests += 1
            ids = self.openvino.Tensor(np.array([prompt], dtype=np.int64))
            handle = self.pipe.add_request(self.num_requests, ids, config)
            self.live[self.num_requests] = (handle, queue)
            self.wake.notify()
        try:
            while (new := await queue.get()) is not None:
                yield new
        except (asyncio.CancelledError, GeneratorExit):
            handle.cancel()
            raise

    async def freed(self) -> None:
        await self.idle.wait()

    async def close(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify()
        await asyncio.to_thread(self.worker.join)


if __name__ == "__main__":
    driver.main(OpenvinoDriver())
