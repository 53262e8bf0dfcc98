"""Phases of ``prove.py`` that ask how fast it is: the machine's own roofs, steps, prefill, the whole engine, a peer."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.attention.base import AttentionSpec, StepLimits
from asyncllm.attention.triton import TritonAttention
from asyncllm.wire.messages import EngineSampling
from asyncllm.wire.step import NewRequest, SchedulerOutput
from asyncllm.worker.model_runner import ModelRunner
from tests.gpu.rig import LLAMA_1B, LLAMA_8B, DeviceRows, LlamaShape, Rig, decode_steps, timed
from tests.support import models

__all__ = ["decode", "environment", "peer", "prefill", "streams"]

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-4", "numpy", "pyzmq", "msgspec")


# --------------------------------------------------------------------------------------------------------- the machine
def environment(rig: Rig) -> dict[str, Any]:
    """What is there, and the rates that the others are measured against."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "varlen_attn": _varlen_signature(),
        **copy_and_matmul_rates(rig),
    }
    if not rig.rehearse:
        properties = torch.cuda.get_device_properties(rig.device)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
    return {**found, "passed": True}


def copy_and_matmul_rates(rig: Rig) -> dict[str, float]:
    """Return the rate of a device-to-device copy (bytes read and written) and of bfloat16 products."""
    size, side = rig.pick(4 << 30, 1 << 16), rig.pick(8192, 64)
    source = torch.zeros(size, dtype=torch.uint8, device=rig.device)
    target = torch.empty_like(source)
    copied = timed(rig, lambda: target.copy_(source), rounds=rig.pick(10, 2))
    left = torch.randn(side, side, dtype=torch.bfloat16, device=rig.device)
    multiplied = timed(rig, lambda: left @ left, rounds=rig.pick(10, 2))
    return {
        "copy_tb_per_s": 2 * size / copied.best_s / 1e12,
        "matmul_tflop_per_s": 2 * side**3 / multiplied.best_s / 1e12,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _varlen_signature() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return str(inspect.signature(varlen_attn))


# -------------------------------------------------------------------------------------------------------------- decode
def decode(rig: Rig) -> dict[str, Any]:
    """Milliseconds of a decode step, and the share of what reading weights, keys and values alone would take."""
    copy_rate = copy_and_matmul_rates(rig)["copy_tb_per_s"] * 1e12
    found: dict[str, Any] = {}
    graph_gain: list[float] = []
    shares: list[float] = []
    for shape in (LLAMA_1B, LLAMA_8B):
        points = rig.pick([(1, 1000), (16, 1000), (64, 1000), (256, 1000), (4, 32000)], [(2, 20)])
        model = rig.make_model(rig.shape(shape), max_position=40000, dtype=torch.bfloat16)
        for num_rows, context in points:
            floor_ms = _floor_ms(rig.shape(shape), num_rows, context, copy_rate)
            times: dict[str, float] = {}
            for mode in ("graph", "eager"):
                times[mode] = _step_ms(rig, model, num_rows, context, with_graphs=mode == "graph")
            key = f"{shape.name}, {num_rows} rows of {context}"
            share = floor_ms / times["graph"]
            found[key] = {
                "graph_ms": round(times["graph"], 3),
                "eager_ms": round(times["eager"], 3),
                "floor_ms": round(floor_ms, 3),
                "share_of_floor": round(share, 3),
                "tokens_per_s": round(num_rows / times["graph"] * 1e3),
            }
            if shape is LLAMA_1B:
                graph_gain.append(times["eager"] / times["graph"])
            else:
                shares.append(share)
        del model
        rig.runtime().empty_cache()
    targets = {"8B_share_of_floor_at_least_0.7": min(shares), "1B_graph_gain_at_least_3": max(graph_gain)}
    passed = rig.rehearse or (min(shares) >= 0.7 and max(graph_gain) >= 3)
    return {"copy_tb_per_s": copy_rate / 1e12, "steps": found, "targets": targets, "passed": passed}


def _floor_ms(shape: LlamaShape, num_rows: int, context: int, copy_rate: float) -> float:
    return (shape.bytes_per_step + num_rows * context * shape.kv_bytes_per_token) / copy_rate * 1e3


def _step_ms(rig: Rig, model: Any, num_rows: int, context: int, *, with_graphs: bool) -> float:
    """Return the time of a step in a row of steps whose results are read one step late, as the engine does."""
    num_steps = rig.pick(30, 2)
    blocks_wanted = num_rows * (context + num_steps + 17) // 16 + 1
    runner = rig.make_runner(
        model,
        dtype=torch.bfloat16,
        num_blocks=rig.pick(min(blocks_wanted, 20000), 40),
        max_num_seqs=num_rows,
        max_num_batched_tokens=max(num_rows, 16),
        max_model_len=context + num_steps + 2,
        sizes=[num_rows] if with_graphs else [],
    )
    steps = decode_steps(runner, num_rows=num_rows, context=context, num_steps=num_steps)
    num_first = rig.pick(5, 1)
    for step in steps[:num_first]:
        last = runner.execute(step)
    runner.runtime.synchronize()
    begun = time.perf_counter()
    for step in steps[num_first:]:
        launched = runner.execute(step)
        last.result()
        last = launched
    last.result()
    took = (time.perf_counter() - begun) / (num_steps - num_first) * 1e3
    runner.graphs.drop()
    return took


# ------------------------------------------------------------------------------------------------------------- prefill
def prefill(rig: Rig) -> dict[str, Any]:
    """Arithmetic rate of a long prompt in chunks, and of the attention kernel beside torch's FlashAttention."""
    shape = rig.shape(LLAMA_8B)
    length = rig.pick(8192, 48)
    model = rig.make_model(shape, max_position=length + 64, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for chunk in rig.pick([2048, 8192], [24, 48]):
        runner = rig.make_runner(
            model,
            dtype=torch.bfloat16,
            num_blocks=length // 16 + 8,
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            max_model_len=length + 8,
        )
        seconds = min(_prefill_s(runner, length, chunk) for _ in range(rig.pick(3, 1)))
        attention_flop = 2 * 2 * shape.layers * shape.heads * shape.head_dim * length * length / 2
        flop = 2 * shape.layer_parameters * length + attention_flop
        found[f"chunks of {chunk}"] = {"seconds": round(seconds, 4), "tflop_per_s": round(flop / seconds / 1e12, 1)}
        del runner
    del model
    rig.runtime().empty_cache()
    kernel = {f"{n} tokens": _attention_against_torch(rig, n) for n in rig.pick([2048, 8192], [48])}
    slowest = min(one["speed_of_torch"] for one in kernel.values())
    is_right = max(one["largest_difference"] for one in kernel.values()) <= 3e-2
    passed = is_right and (rig.rehearse or slowest >= 0.5)
    return {"prefill": found, "attention": kernel, "attention_at_least_0.5_of_torch": slowest, "passed": passed}


def _prefill_s(runner: ModelRunner, length: int, chunk: int) -> float:
    request = NewRequest(
        slot=0,
        request_id=0,
        token_ids=[1] * length,
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=list(range(1, length // 16 + 2)),
        sampling=EngineSampling(max_tokens=2),
    )
    sizes = [min(chunk, length - begin) for begin in range(0, length, chunk)]
    steps = [SchedulerOutput(step, [0], [size], size) for step, size in enumerate(sizes)]
    steps[0].new_requests = [request]
    runner.runtime.synchronize()
    begun = time.perf_counter()
    for step in steps:
        result = runner.execute(step)
    result.result()
    took = time.perf_counter() - begun
    runner.batch.apply(SchedulerOutput(99, [], [], 0, freed_slots=[0]))
    return took


def _attention_against_torch(rig: Rig, length: int) -> dict[str, float]:
    """Time causal attention of one prompt in the 8B shape, ours over pages and torch's over one piece of memory."""
    heads, kv_heads, dim = rig.pick((32, 8, 128), (4, 2, 16))
    dtype = rig.pick(torch.bfloat16, torch.float32)
    spec = AttentionSpec(
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=16,
        dtype=dtype,
        device=rig.device,
    )
    limits = StepLimits(max_num_seqs=2, max_num_batched_tokens=length, max_model_len=length)
    rows = DeviceRows(rig, spec, [length], limits)
    backend = TritonAttention(spec)
    [cache] = backend.allocate(rows.num_blocks)
    plans: list[Any] = []
    plan_of = backend.plan
    backend.plan = lambda batch: plans.append(plan_of(batch)) or plans[-1]  # type: ignore[method-assign]
    [ours] = rows.run(backend, cache, [(0, 0, length)])
    query = rows.queries[0]
    q, k, v = (part[0].transpose(0, 1).unsqueeze(0) for part in (rows.queries, rows.keys, rows.values))
    group = heads // kv_heads
    k, v = k.repeat_interleave(group, 1).contiguous(), v.repeat_interleave(group, 1).contiguous()
    q = q.contiguous()
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)[0].transpose(0, 1).flatten(1)
    rounds = rig.pick(20, 1)
    our_time = timed(rig, lambda: backend.forward(query, cache, plans[0], scale=0.3), rounds=rounds)
    torch_time = timed(rig, lambda: scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), rounds=rounds)
    flop = 2 * 2 * heads * dim * length * length / 2
    return {
        "our_ms": our_time.median_s * 1e3,
        "torch_ms": torch_time.median_s * 1e3,
        "our_tflop_per_s": flop / our_time.median_s / 1e12,
        "speed_of_torch": torch_time.median_s / our_time.median_s,
        "largest_difference": (ours.double() - theirs.double()).abs().max().item(),
    }


# ---------------------------------------------------------------------------------------------------- the whole engine
def write_middle_llama(path: Path, rig: Rig) -> Path:
    """Write a random Llama of some 0.3 B weights (rehearsed: a tiny one) that transformers reads as well."""
    path.mkdir()
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": 32000,
    }
    return models.write_tiny_llama(path, **rig.pick(sizes, {}))


def streams(rig: Rig, folder: Path) -> dict[str, Any]:
    """Many streams at once through AsyncLLM, a quarter of them cancelled; overlapped scheduling on and off."""
    path = write_middle_llama(folder / "middle", rig)
    found = {
        f"async_scheduling={overlapped}": asyncio.run(_stream_all(rig, path, overlapped))
        for overlapped in (True, False)
    }
    return {**found, "passed": all(run["all_done"] and run["all_blocks_free"] for run in found.values())}


async def _stream_all(rig: Rig, path: Path, overlapped: bool) -> dict[str, Any]:
    num_streams, count = rig.pick((64, 200), (6, 6))
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    first_s: list[float] = []
    gaps_s: list[float] = []
    num_tokens = 0

    options = {**rig.engine_options, "max_num_seqs": rig.pick(64, 8)}
    async with AsyncLLM(path, async_scheduling=overlapped, **options) as llm:

        async def consume(nth: int, stop_after: int | None) -> int:
            nonlocal num_tokens
            prompt = [(nth * 31 + i) % 200 for i in range(rig.pick(128, 12))]
            begun = last = time.perf_counter()
            taken = 0
            async with llm.stream(prompt, params) as stream:
                async for delta in stream:
                    now = time.perf_counter()
                    (gaps_s if taken else first_s).append(now - last)
                    last = now
                    taken += len(delta.token_ids)
                    num_tokens += len(delta.token_ids)
                    if stop_after is not None and taken >= stop_after:
                        break
            assert last >= begun
            return taken

        await consume(999, None)  # warm
        first_s.clear()
        gaps_s.clear()
        num_tokens = 0
        begun = time.perf_counter()
        plan = [count // 2 if nth % 4 == 0 else None for nth in range(num_streams)]
        taken = await asyncio.gather(*(consume(nth, stop) for nth, stop in enumerate(plan)))
        took = time.perf_counter() - begun
        await llm.drain()
        stats = await llm.stats()
        return {
            "tokens_per_s": round(num_tokens / took),
            "first_token_p50_ms": round(statistics.median(first_s) * 1e3, 2),
            "gap_p50_ms": round(statistics.median(gaps_s) * 1e3, 3),
            "gap_p99_ms": round(sorted(gaps_s)[int(len(gaps_s) * 0.99)] * 1e3, 3),
            "all_done": all(got >= (stop or count) for got, stop in zip(taken, plan, strict=True)),
            "all_blocks_free": stats.num_running == 0 and stats.num_free_blocks == llm.info.num_blocks,
        }


# -------------------------------------------------------------------------------------------------------------- a peer
def peer(rig: Rig, folder: Path) -> dict[str, Any]:
    """Tokens per second of static batches, ours beside transformers' ``generate`` on the same weights in bfloat16."""
    path = write_middle_llama(folder / "middle", rig)
    batches, count = rig.pick(([1, 16, 64], 128), ([1, 3], 4))
    theirs = _transformers_rates(rig, path, batches, count)
    ours = asyncio.run(_our_rates(rig, path, batches, count))
    ratio = {size: round(ours[size] / theirs[size], 2) for size in batches}
    passed = rig.rehearse or min(ratio.values()) > 1
    return {"transformers_tokens_per_s": theirs, "our_tokens_per_s": ours, "ratio": ratio, "passed": passed}


def _transformers_rates(rig: Rig, path: Path, batches: Sequence[int], count: int) -> dict[int, int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16).to(rig.device).eval()
    rates: dict[int, int] = {}
    for size in batches:
        ids = torch.full((size, rig.pick(128, 8)), 5, device=rig.device)

        def run(ids: torch.Tensor = ids) -> None:
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )

        rates[size] = round(size * count / timed(rig, run, rounds=rig.pick(2, 1), warm_up=1).best_s)
    return rates


async def _our_rates(rig: Rig, path: Path, batches: Sequence[int], count: int) -> dict[int, int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    rates: dict[int, int] = {}
    options = {**rig.engine_options, "dtype": "bfloat16", "enable_prefix_caching": False, "max_num_seqs": batches[-1]}
    async with AsyncLLM(path, **options) as llm:
        for size in batches:
            prompt = [5] * rig.pick(128, 8)
            best_s = float("inf")
            for _ in range(rig.pick(3, 1)):
                begun = time.perf_counter()
                await asyncio.gather(*(llm.generate(prompt, params) for _ in range(size)))
                best_s = min(best_s, time.perf_counter() - begun)
            rates[size] = round(size * count / best_s)
    return rates
