"""What does the scheduler cost per step: `schedule()` plus `update_from_output()`, without any model?

    python benchmarks/scheduler.py [--running 1 64 256 1024] [--steps 320]

So many requests of 16 prompt tokens decode with nothing else going on; blocks hold 16 tokens, so a sixteenth of them
takes a block in each step, and each block that fills is hashed (prefix cache on). Tokens are made up by a fixed rule.
Per step: median and 99th percentile; `us_per_request` is the median spread over the requests. `prefill` admits and
computes 256 prompts of 512 tokens that share their first half, in chunks of 1024; `abort` adds and drops 10,000.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import report

from asyncllm.config import EngineConfig
from asyncllm.core.scheduler import Scheduler
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling
from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

LONG = EngineSampling(max_tokens=4096)


def make_scheduler(num_seqs: int) -> Scheduler:
    config = EngineConfig.from_options("none", max_num_seqs=num_seqs, max_num_batched_tokens=max(1024, num_seqs))
    return Scheduler(config, num_blocks=num_seqs * 64 + 4096, max_model_len=8192, eos_token_ids=(2,))


def request(request_id: int, num_tokens: int, num_shared: int = 0) -> EngineCoreRequest:
    own = [3 + (request_id * 7919 + i * 31) % 49_000 for i in range(num_tokens - num_shared)]
    return EngineCoreRequest(request_id, [5] * num_shared + own, LONG)


def sample(scheduler: Scheduler, step: SchedulerOutput) -> ModelRunnerOutput:
    """Draw a token for each row that has computed all its tokens, as a worker does."""
    slot_to_request = {one.slot: one for one in scheduler.running}
    tokens: list[int] = []
    for slot in step.slots:
        has_caught_up = slot_to_request[slot].border > 0
        tokens.append(100 + (step.step_id * 131 + slot * 17) % 40_000 if has_caught_up else -1)
    return ModelRunnerOutput(step.step_id, tokens)


def decode(num_running: int, num_steps: int) -> dict[str, Any]:
    scheduler = make_scheduler(num_running)
    for request_id in range(num_running):
        scheduler.add_request(request(request_id, 16 + request_id % 16))  # block borders spread over the steps
    schedule_s: list[float] = []
    update_s: list[float] = []
    gc.collect()
    while len(schedule_s) < num_steps:
        begun = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        output = sample(scheduler, step)
        is_decode = step.total_num_tokens == num_running == len(step.slots)
        sampled = time.perf_counter()
        scheduler.update_from_output(step, output)
        updated = time.perf_counter()
        if is_decode:
            schedule_s.append(scheduled - begun)
            update_s.append(updated - sampled)
    both = [1e6 * (a + b) for a, b in zip(schedule_s, update_s, strict=True)]
    return {
        "step_us": round(report.quantile(both, 0.5), 2),
        "step_us_p99": round(report.quantile(both, 0.99), 2),
        "schedule_us": round(1e6 * report.quantile(schedule_s, 0.5), 2),
        "update_us": round(1e6 * report.quantile(update_s, 0.5), 2),
        "us_per_request": round(report.quantile(both, 0.5) / num_running, 3),
    }


def prefill() -> dict[str, Any]:
    scheduler = make_scheduler(256)
    for request_id in range(256):
        scheduler.add_request(request(request_id, 512, num_shared=256))
    spent_s = 0.0
    while scheduler.waiting:
        begun = time.perf_counter()
        step = scheduler.schedule()
        spent_s += time.perf_counter() - begun
        assert step is not None
        scheduler.update_from_output(step, sample(scheduler, step))
    stats = scheduler.stats()
    return {
        "schedule_us_per_prompt": round(1e6 * spent_s / 256, 1),
        "schedule_us_per_computed_token": round(1e6 * spent_s / stats.num_prefill_tokens, 3),
        "hit_rate": round(stats.prefix_hits / stats.prefix_queries, 3),
    }


def abort() -> dict[str, Any]:
    scheduler = make_scheduler(256)
    requests = [request(request_id, 16) for request_id in range(10_000)]
    begun = time.perf_counter()
    for one in requests:
        scheduler.add_request(one)
    added = time.perf_counter()
    scheduler.schedule()
    scheduled = time.perf_counter()
    for request_id in range(0, 10_000, 2):
        scheduler.abort_requests([request_id])
    scheduler.abort_requests(range(10_000))
    aborted = time.perf_counter()
    assert not scheduler.has_unfinished()
    return {
        "add_us": round(1e6 * (added - begun) / 10_000, 2),
        "abort_us": round(1e6 * (aborted - scheduled) / 10_000, 2),
    }


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=320)
    args = parser.parse_args()
    figures: dict[str, Any] = {f"decode_{count}": decode(count, args.steps) for count in args.running}
    figures["prefill_256x512"] = prefill()
    figures["queue_10000"] = abort()
    report.emit("scheduler", figures, args)


if __name__ == "__main__":
    main()
