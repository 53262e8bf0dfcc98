"""llama.cpp inside the process, through the C interface that llama-cpp-python exposes, with a small continuous batcher.

Its own Python class serves one sequence at a time, so this file does what llama-server does: every step is one
llama_decode over one token of each running sequence plus prompt tokens, up to N_BATCH. ``model`` is a .gguf file.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import driver

N_BATCH = 1024


class Request:
    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.todo, self.max_tokens = list(prompt), max_tokens
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()
        self.position, self.num_made, self.slot, self.cancelled = 0, 0, -1, False


class LlamacppDriver(driver.Driver):
    async def start(self, settings: dict[str, Any]) -> None:
        begun = time.perf_counter()
        import llama_cpp
        import numpy as np

        self.import_s = time.perf_counter() - begun
        self.lib, self.np = llama_cpp, np
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), llama_cpp.llama_model_default_params())
        slots = settings["max_num_seqs"]
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = slots * settings["max_model_len"]
        params.n_batch = N_BATCH
        params.n_seq_max = slots
        params.n_threads = params.n_threads_batch = settings["threads"]
        self.context = model and llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot open {settings['model']}")
        self.num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.cache = llama_cpp.llama_get_memory(self.context)
        self.tokens = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self.loop = asyncio.get_running_loop()
        self.wake = threading.Condition()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free = list(range(slots))
        self.stopping = False
        self.idle = asyncio.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while True:
            with self.wake:
                self.wake.wait_for(lambda: self.running or self.waiting or self.stopping)
                if self.stopping:
                    return
                while self.waiting and self.free:
                    request = self.waiting.pop(0)
                    request.slot = self.free.pop()
                    self.running.append(request)
            for request in [request for request in self.running if request.cancelled]:
                self.release(request)
            if self.running:
                self.step()
            else:
                self.tell(self.idle.set)

    def step(self) -> None:
        batch, drawing = self.tokens, []
        batch.n_tokens = 0
        # Decoding sequences have one token to do and come first; what is left of the batch goes to prompts.
        for request in sorted(self.running, key=lambda request: len(request.todo) > 1):
            take = request.todo[: N_BATCH - batch.n_tokens]
            for token in take:
                i = batch.n_tokens
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, request.position, 1
                batch.seq_id[i][0], batch.logits[i] = request.slot, False
                request.position += 1
                batch.n_tokens += 1
            del request.todo[: len(take)]
            if take and not request.todo:
                batch.logits[batch.n_tokens - 1] = True
                drawing.append((batch.n_tokens - 1, request))
        if self.lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        for place, request in drawing:
            logits = self.lib.llama_get_logits_ith(self.context, place)
            token = int(self.np.ctypeslib.as_array(logits, (self.num_vocab,)).argmax())
            request.num_made += 1
            self.tell(request.queue.put_nowait, token)
            if request.num_made == request.max_tokens:
                self.release(request)
            else:
                request.todo.append(token)

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.lib.llama_memory_seq_rm(self.cache, request.slot, -1, -1)
        self.free.append(request.slot)
        self.tell(request.queue.put_nowait, None)

    def tell(self, function: Any, *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *values)

    async def stream(self, prompt: list[int], max_tokens: int) -> AsyncIterator[list[int]]:
        request = Request(prompt, max_tokens)
        self.idle.clear()
        with self.wake:
            self.waiting.append(request)
            self.wake.notify()
        try:
            while (token := await request.queue.get()) is not None:
                yield [token]
        finally:
            request.cancelled = True

    async def freed(self) -> None:
        await self.idle.wait()

    async def close(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify()
        await asyncio.to_thread(self.thread.join)


if __name__ == "__main__":
    driver.main(LlamacppDriver())
