"""A worker that notes when each step began and how long it was inside the model, for benchmarks.

Give an engine ``worker_cls=TIMED_WORKER``, run it, and fetch the notes with ``collective_rpc("take_steps")``. What a
step costs beyond the model is then its wall time, from its beginning to the next one's, less that: scheduling,
preparing the batch, sampling, and sending. The notes themselves cost about 2 µs a step.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import report

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.wire.step import SchedulerOutput
from asyncllm.worker.worker import Worker

TIMED_WORKER = "timed_worker.TimedWorker"


class TimedModel:
    """A model; every call of it or of its methods is inside the forward pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.inside_s = 0.0

    def __call__(self, *args: Any) -> Any:
        return self._timed(self._model, *args)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._timed(found, *args, **kwargs)

    def _timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.inside_s += time.perf_counter() - begun


class TimedWorker(Worker):
    """A worker with notes: per step its beginning, rows, tokens and seconds inside the model."""

    def load_model(self) -> None:
        super().load_model()
        self._timed = TimedModel(self._model)
        self._model = self._timed  # pyright: ignore[reportAttributeAccessIssue]
        self._steps: list[tuple[float, int, int, float]] = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        begun, inside_s = time.perf_counter(), self._timed.inside_s
        result = super().execute_model(scheduler_output)
        rows, tokens = len(scheduler_output.slots), scheduler_output.total_num_tokens
        self._steps.append((begun, rows, tokens, self._timed.inside_s - inside_s))
        return result

    def take_steps(self) -> list[tuple[float, int, int, float]]:
        """Return the notes since the last call."""
        steps, self._steps = self._steps, []
        return steps


async def decode_together(llm: AsyncLLM, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """Run ``prompts``, all begun in the same step, and return :func:`decode_step_ms` of them."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    await llm.collective_rpc("take_steps")
    await llm.pause()
    tasks = [asyncio.create_task(llm.generate(prompt, params)) for prompt in prompts]
    while (await llm.stats()).num_waiting < len(prompts):
        pass
    await llm.resume()
    await asyncio.gather(*tasks)
    (steps,) = await llm.collective_rpc("take_steps")
    return decode_step_ms(steps, len(prompts))


def decode_step_ms(steps: list[Any], streams: int) -> dict[str, float]:
    """Return the median step in which all ``streams`` decode, inside and beyond the model.

    :raises RuntimeError: there are no two such steps in a row.
    """
    walls: list[float] = []
    insides: list[float] = []
    for (begun, rows, tokens, inside_s), (next_begun, next_rows, next_tokens, _) in itertools.pairwise(steps):
        if rows == tokens == next_rows == next_tokens == streams:
            walls.append(next_begun - begun)
            insides.append(inside_s)
    if not walls:
        raise RuntimeError(f"in none of {len(steps)} steps all {streams} streams decode")
    beyond = [wall - inside for wall, inside in zip(walls, insides, strict=True)]
    medians = {"step": walls, "forward": insides, "beyond_forward": beyond}
    return {f"{name}_ms": round(report.quantile(values, 0.5) * 1e3, 4) for name, values in medians.items()}
