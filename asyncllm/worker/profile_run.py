"""The largest step there will be, run once on requests that nobody sent, and the largest graph: what memory they take.

Device-agnostic: the numbers come from a :class:`asyncllm.worker.memory.DeviceMemory`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.config import SchedulerConfig
    from asyncllm.worker.memory import DeviceMemory
    from asyncllm.worker.model_runner import ModelRunner

__all__ = ["largest_step", "measure_graph_bytes", "measure_step_bytes"]

BYTES_PER_GRAPH = 4 << 20  # of a graph itself, whatever its size: its nodes, with their arguments

DEAREST_SAMPLING = EngineSampling(
    max_tokens=2, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=1
)
"""Sorted logits, counts of tokens and log-probabilities exist beside each other."""


def largest_step(scheduler: SchedulerConfig, *, block_size: int, max_prompt_len: int) -> SchedulerOutput:
    """Return a step of as many tokens as a step may have, in as many rows as may run, each of which draws a token.

    All rows are whole prompts, of ``max_prompt_len`` tokens at most, in the null block, whose content no row ever sees.
    """
    num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    num_tokens = min(scheduler.max_num_batched_tokens, num_rows * max_prompt_len)
    lens = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    requests = [
        NewRequest(
            slot=slot,
            request_id=-1 - slot,
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[0] * -(-length // block_size),
            sampling=DEAREST_SAMPLING,
        )
        for slot, length in enumerate(lens)
    ]
    return SchedulerOutput(-1, list(range(num_rows)), lens, num_tokens, requests)


def measure_step_bytes(make_runner: Callable[[], ModelRunner], step: SchedulerOutput, memory: DeviceMemory) -> int:
    """Return what the runner and its ``step`` take of the device beyond what is there before and after, in bytes.

    What stays behind, such as scratch memory that a backend keeps, is not part of it: it is missing from what is free.
    """
    memory.synchronize()
    memory.empty_cache()
    memory.reset_peak()
    make_runner().execute(step).result()  # the runner is gone when this line is over
    memory.synchronize()
    peak_bytes = memory.peak_allocated_bytes()
    memory.empty_cache()
    return max(peak_bytes - memory.allocated_bytes(), 0)


def measure_graph_bytes(make_runner: Callable[[], ModelRunner], memory: DeviceMemory) -> int:
    """Return what the graphs of such a runner will take, in bytes; 0 where it records none.

    The largest one is recorded and dropped: all others share its memory.
    """
    runner = make_runner()
    graphs = runner.graphs
    if not graphs.sizes:
        return 0
    memory.synchronize()
    memory.empty_cache()
    before_bytes, _ = memory.memory_info()
    num_graphs, graphs.sizes = len(graphs.sizes), graphs.sizes[-1:]
    runner.capture_graphs()
    memory.synchronize()
    after_bytes, _ = memory.memory_info()
    graphs.drop()
    del runner
    memory.empty_cache()
    return max(before_bytes - after_bytes, 0) + num_graphs * BYTES_PER_GRAPH
