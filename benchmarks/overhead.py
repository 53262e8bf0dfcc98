"""What does the engine itself cost per token and per step, and which part of it?

    python benchmarks/overhead.py [--streams 1 16 64 256 1024] [--executor model|scripted] [--plot FILE]

A two-layer model (or, "scripted", no model at all) makes everything around the forward pass visible. Each stream has
16 prompt tokens and 128 output tokens, greedy, end of sequence ignored, one asyncio task per stream, all started at
once.

"end_to_end" is AsyncLLM with its engine process: wall time per token and per step (all streams decode together, so
128 steps), and the CPU time of both processes; with a model, also the median step in which all streams decode, and how
much of it is inside the forward pass and beyond it. "parts" runs the same step in one thread, one part after the other,
and times each: scheduler, worker (with the model; "worker_beyond_forward" without its forward pass), wire (encode and
decode), front end (detokenize and fill the streams).

With a real model (``--model FILE --streams 1``), beyond_forward_ms is what Python and the engine add to each of its
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import tiny_model
from timed_worker import TIMED_WORKER, decode_step_ms, decode_together

from asyncllm import AsyncLLM, Completion, EngineConfig, SamplingParams, TokenDelta, Usage
from asyncllm.checkpoint import open_checkpoint
from asyncllm.core.engine_core import EngineCore
from asyncllm.frontend.input_processor import InputProcessor
from asyncllm.frontend.output_processor import OutputProcessor
from asyncllm.frontend.tokenizer import Tokenizer
from asyncllm.testing import scripted_options
from asyncllm.wire.codec import make_encoder, output_decoder

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # "parts" runs the worker here; engine processes have it anyway

PROMPT_TOKENS, OUTPUT_TOKENS = 16, 128
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": max(args.streams),
        "max_num_batched_tokens": max(2048, *args.streams),
        "num_blocks": max(64, max(args.streams) * (-(-(PROMPT_TOKENS + OUTPUT_TOKENS) // 16) + 1)),
        "enable_prefix_caching": not args.no_prefix_caching,
    }
    if args.executor == "scripted":
        options |= scripted_options(tokens=list(range(ord("a"), ord("z") + 1)))
    else:
        options["worker_cls"] = TIMED_WORKER
    return options


def prompts(streams: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(32, 250) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]


# ------------------------------------------------------------------------------------------------------- end to end
def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, to the nanosecond, from its own clock (Linux: clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


async def count_tokens(llm: AsyncLLM, prompt: list[int]) -> int:
    return sum([len(delta.token_ids) async for delta in llm.stream(prompt, PARAMS)])


async def one_load(llm: AsyncLLM, streams: int, draw: random.Random) -> dict[str, float]:
    asked = prompts(streams, draw)
    pids = {"caller": os.getpid(), "engine": llm.info.pid}
    steps_before = (await llm.stats()).num_steps
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    begun = time.perf_counter()
    counts = await asyncio.gather(*(count_tokens(llm, prompt) for prompt in asked))
    wall_s = time.perf_counter() - begun
    after = {name: cpu_s(pid) for name, pid in pids.items()}
    tokens = sum(counts)
    if tokens != streams * OUTPUT_TOKENS:
        raise RuntimeError(f"{tokens} tokens instead of {streams * OUTPUT_TOKENS}")
    steps = (await llm.stats()).num_steps - steps_before
    return {
        "tokens_per_s": round(tokens / wall_s, 1),
        "wall_us_per_token": round(wall_s / tokens * 1e6, 2),
        "wall_ms_per_step": round(wall_s / OUTPUT_TOKENS * 1e3, 3),
        "steps": steps,
        **{f"{name}_cpu_us_per_token": round((after[name] - before[name]) / tokens * 1e6, 2) for name in pids},
    }


async def end_to_end(model: str, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    figures: dict[str, Any] = {}
    async with AsyncLLM(model, **engine_options(args)) as llm:
        await one_load(llm, min(args.streams), draw)
        for streams in args.streams:
            runs = [await one_load(llm, streams, draw) for _ in range(args.rounds)]
            figures[str(streams)] = sorted(runs, key=lambda run: run["wall_us_per_token"])[len(runs) // 2]
            if args.executor == "model":
                figures[str(streams)] |= await decode_together(llm, prompts(streams, draw), OUTPUT_TOKENS)
    return figures


# ------------------------------------------------------------------------------------------------- one part at a time
class Parts:
    """The six sentences of the README in one thread, each part timed."""

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        self.timed = args.executor == "model"
        self.config = EngineConfig.from_options(model, **engine_options(args))
        self.core = EngineCore(self.config, lambda _phase, _fraction: None)
        checkpoint = open_checkpoint(model)
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        self.inputs = InputProcessor(self.config, checkpoint, tokenizer)
        self.inputs.set_info(self.core.info)
        self.outputs = OutputProcessor(tokenizer)
        self.encode, self.decode = make_encoder(), output_decoder()

    def run(self, streams: int, draw: random.Random) -> dict[str, float]:
        """Return median times of the steps in which all streams decode."""
        scheduler, executor = self.core.scheduler, self.core.executor
        for prompt in prompts(streams, draw):
            processed = self.inputs.process(prompt, PARAMS)
            self.outputs.add_request(processed, CountingSink())
            for request in processed.requests:
                scheduler.add_request(request)
        clock = time.perf_counter
        rows: list[tuple[float, ...]] = []
        if self.timed:
            executor.collective_rpc("take_steps")
        while scheduler.has_unfinished():
            at = [clock()]
            step = scheduler.schedule()
            at.append(clock())
            output = executor.execute_model(step).result()
            at.append(clock())
            outputs = scheduler.update_from_output(step, output)
            at.append(clock())
            message = self.encode(outputs)
            at.append(clock())
            received = self.decode(message)
            at.append(clock())
            self.outputs.process(received)
            at.append(clock())
            if len(step.slots) == step.total_num_tokens == streams:
                rows.append(tuple(b - a for a, b in itertools.pairwise(at)))
        schedule, worker, update, encode, decode, frontend = (
            report.quantile([row[part] for row in rows], 0.5) * 1e3 for part in range(6)
        )
        figures = {
            "scheduler": schedule + update,
            "worker": worker,
            "wire": encode + decode,
            "front_end": frontend,
            "scheduler_and_wire": schedule + update + encode + decode,
        }
        if self.timed:
            inside_ms = decode_step_ms(executor.collective_rpc("take_steps")[0], streams)["forward_ms"]
            figures["worker_beyond_forward"] = worker - inside_ms
        return {f"{name}_ms_per_step": round(value, 4) for name, value in figures.items()}


class CountingSink:
    """A reader that takes everything at once."""

    def __init__(self) -> None:
        self.num_items = 0

    def put(self, delta: TokenDelta) -> None:
        self.num_items += 1

    def finish(self, completion: Completion) -> None:
        pass

    def fail(self, error: BaseException, usage: Usage) -> None:
        raise error


def parts(model: str, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    timed = Parts(model, args)
    try:
        timed.run(min(args.streams), draw)
        return {str(streams): timed.run(streams, draw) for streams in args.streams}
    finally:
        timed.core.shutdown()


def main() -> None:
    parser = report.parser(__doc__ or "", plot=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--executor", choices=("model", "scripted"), default="model")
    parser.add_argument("--model", help="default: the tiny model of tiny_model.py, made in a temporary folder")
    parser.add_argument("--rounds", type=int, default=3, help="per load; the median by wall time counts")
    parser.add_argument("--no-prefix-caching", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(tiny_model.write(Path(folder)))
        figures = {"end_to_end": asyncio.run(end_to_end(model, args)), "parts": parts(model, args)}
    report.emit(f"overhead_{args.executor}", figures, args)
    if args.plot:
        loads = figures["end_to_end"].values()
        curves = {
            "wall": [load["wall_us_per_token"] for load in loads],
            "caller CPU": [load["caller_cpu_us_per_token"] for load in loads],
            "engine CPU": [load["engine_cpu_us_per_token"] for load in loads],
        }
        labels = {"x_label": "streams", "y_label": "µs per token", "title": f"Engine overhead ({args.executor})"}
        report.draw(args.plot, args.streams, curves, **labels)


if __name__ == "__main__":
    main()
