"""Phases of ``prove.py`` that ask whether results are right: kernels, models, graphs, sampler."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncllm import LLM, SamplingParams
from asyncllm.attention.base import AttentionSpec, StepLimits
from asyncllm.attention.triton import TritonAttention
from asyncllm.sampling.columns import SamplingColumns
from asyncllm.sampling.device_draw import make_device_draw
from asyncllm.sampling.penalties import TokenHistory
from asyncllm.sampling.rng import uniforms
from asyncllm.sampling.sampler import Sampler
from asyncllm.wire.step import SchedulerOutput
from asyncllm.worker.model_runner import ModelRunner
from tests.gpu.rig import LLAMA_1B, DeviceRows, Rig, decode_steps, timed
from tests.support import models
from tests.support.attention import exact
from tests.support.sampling import sampling

__all__ = ["graphs", "kernels", "parity", "sampler"]

Step = list[tuple[int, int, int]]

DTYPE_TO_TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Outputs are up to 8: one unit of their last place in 16 bits. Sums of 2,048 keys at head dim 256 in float32 are off
by 1.5e-5 in plain torch too."""


# --------------------------------------------------------------------------------------------------------- the kernel
def kernels(rig: Rig) -> dict[str, Any]:
    """Attention against float64 on every shape that models have; the same bits alone, padded and in company."""
    cases = list(_cases(rig))
    failures: list[str] = []
    worst: dict[str, float] = {}
    for nth, case in enumerate(cases, 1):
        error = _attention_error(rig, **case)
        dtype: torch.dtype = case["dtype"]
        worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
        if not error <= DTYPE_TO_TOLERANCE[dtype]:
            failures.append(f"error {error:.2e}: {case}")
        print(json.dumps({"cases": nth, "largest_error": worst, "failures": failures}), flush=True)
    for name, check in {"alone": _alone_or_in_company, "whole": _whole_or_in_chunks}.items():
        failures += [f"{name}: {text}" for text in check(rig)]
    return {"cases": len(cases), "largest_error": worst, "failures": failures, "passed": not failures}


def _cases(rig: Rig) -> Any:
    """Yield shapes: each is compiled anew, which takes seconds, so they are few and each differs in several ways."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    real = [
        (bf16, 128, 16, (32, 8), None),
        (bf16, 64, 16, (32, 8), None),
        (f32, 128, 16, (32, 8), None),
        (f16, 128, 16, (32, 8), None),
        (bf16, 128, 16, (16, 16), 100),
        (bf16, 64, 32, (9, 3), None),
        (bf16, 256, 256, (8, 1), 100),
        (bf16, 80, 1, (8, 2), None),
        (f32, 64, 16, (9, 3), 100),
        (bf16, 96, 7, (10, 2), None),
        (f16, 256, 32, (16, 8), None),
    ]
    rehearsed = [(f32, 16, 4, (4, 2), None), (f32, 16, 16, (4, 2), 9)]
    for dtype, dim, page, (num_heads, kv_heads), window in rig.pick(real, rehearsed):
        where = {"dtype": dtype, "head_dim": dim, "block_size": page, "heads": num_heads}
        yield {**where, "kv_heads": kv_heads, "window": window}


def _spec(rig: Rig, **shape: Any) -> AttentionSpec:
    return AttentionSpec(
        num_layers=1,
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        block_size=shape["block_size"],
        dtype=shape["dtype"],
        device=rig.device,
    )


def _rows(rig: Rig, lens: Sequence[int], **shape: Any) -> DeviceRows:
    longest = max(lens)
    limits = StepLimits(max_num_seqs=32, max_num_batched_tokens=2 * sum(lens), max_model_len=2 * longest)
    return DeviceRows(rig, _spec(rig, **shape), lens, limits)


def _backend(rows: DeviceRows) -> tuple[TritonAttention, torch.Tensor]:
    """Return the backend, and a cache in which whatever is read without having been written shows."""
    backend = TritonAttention(rows.spec)
    [cache] = backend.allocate(rows.num_blocks)
    return backend, cache.fill_(torch.nan)


def _attention_error(rig: Rig, *, window: int | None, **shape: Any) -> float:
    lens = rig.pick([1, 17, 300, 2048], [1, 21, 40])
    rows = _rows(rig, lens, **shape)
    backend, cache = _backend(rows)
    steps: list[Step] = [
        [(row, 0, length - 9) for row, length in enumerate(lens) if length > 9],
        [(row, max(length - 9, 0), length - 1) for row, length in enumerate(lens) if length > 1],
        [(row, length - 1, length) for row, length in enumerate(lens)],
    ]
    worst = 0.0
    for parts in steps:
        results = rows.run(backend, cache, parts, window=window)
        for (row, begin, end), got in zip(parts, results, strict=True):
            want = exact(rows, row, window=window)[begin:end]
            error = (got.double() - want).abs().max().item()
            worst = max(worst, error) if error == error else float("inf")
    return worst


def _shapes(rig: Rig) -> list[dict[str, Any]]:
    dtype = rig.pick(torch.bfloat16, torch.float32)
    dim = rig.pick(128, 16)
    return [{"dtype": dtype, "head_dim": dim, "block_size": 16, "heads": 8, "kv_heads": 2}]


def _alone_or_in_company(rig: Rig) -> list[str]:
    """A row's bits with neighbours, padded as under a graph, and alone."""
    failures: list[str] = []
    lens = rig.pick([3000, 5, 700, 64], [70, 5, 33])
    for shape in _shapes(rig):
        rows = _rows(rig, lens, **shape)
        everyone: Step = [(row, 0, length - 1) for row, length in enumerate(lens)]
        last: Step = [(row, length - 1, length) for row, length in enumerate(lens)]

        def results(steps: list[Step], padding: int = 0, rows: DeviceRows = rows) -> list[torch.Tensor]:
            backend, cache = _backend(rows)
            return [part for parts in steps for part in rows.run(backend, cache, parts, padding=padding)]

        together = results([everyone, last])
        padded = results([everyone, last], padding=4)
        failures += [f"padded, {shape}"] * (not all(map(torch.equal, together, padded)))
        for row in range(len(lens)):
            alone = results([[everyone[row]], [last[row]]])
            if not (torch.equal(alone[0], together[row]) and torch.equal(alone[1], together[len(lens) + row])):
                failures.append(f"row {row} of {lens}, {shape}")
    return failures


def _whole_or_in_chunks(rig: Rig) -> list[str]:
    """A prompt's numbers do not depend on how it is cut, beyond rounding."""
    [shape] = _shapes(rig)
    length = rig.pick(2000, 50)
    rows = _rows(rig, [length], **shape)
    backend, cache = _backend(rows)
    [whole] = rows.run(backend, cache, [(0, 0, length)])
    backend, cache = _backend(rows)
    cuts = [0, length // 3, length // 2, length - 1, length]
    parts = [rows.run(backend, cache, [(0, a, b)])[0] for a, b in itertools.pairwise(cuts)]
    error = (torch.cat(parts).double() - whole.double()).abs().max().item()
    return [] if error <= DTYPE_TO_TOLERANCE[shape["dtype"]] else [f"differs by {error:.2e}"]


# ---------------------------------------------------------------------------------------------------------- the models
def parity(rig: Rig, folder: Path) -> dict[str, Any]:
    """Greedy tokens of tiny models equal transformers' in float32: together, chunked, cached and preempted."""
    found: dict[str, Any] = {}
    for name, write in {"llama": _write_llama, "qwen3": _write_qwen3}.items():
        path = folder / name
        path.mkdir()
        write(path, rig)
        prompts = [[(7 * i + 3 * n) % 250 for i in range(n)] for n in rig.pick([5, 130, 33, 600], [5, 40, 17])]
        count = rig.pick(64, 6)
        expected = _transformers_tokens(rig, path, prompts, count)
        common = {**rig.engine_options, "dtype": "float32", "in_process": True, "max_num_seqs": 8}
        ways: dict[str, dict[str, Any]] = {
            "together": {},
            "chunked": {"max_num_batched_tokens": 48},
            "preempted": {"num_blocks": rig.pick(60, 8), "max_num_seqs": 4},
            "eager": {"enforce_eager": True},
            "one step at a time": {"async_scheduling": False},
        }
        for way, options in ways.items():
            with LLM(path, **{**common, **options}) as llm:
                runs = [_tokens(llm, prompts, count), _tokens(llm, prompts, count)]  # the second finds its prefixes
            found[f"{name}, {way}"] = [run == expected for run in runs]
    passed = all(all(same) for same in found.values())
    return {"equal_first_and_cached": found, "passed": passed}


def _write_llama(path: Path, rig: Rig) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    models.write_tiny_llama(path, **rig.pick({**sizes, **layers}, {}))


def _write_qwen3(path: Path, rig: Rig) -> None:
    models.write_tiny_qwen3(path, **rig.pick({"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64}, {}))


def _tokens(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return [done.token_ids for done in llm.generate(prompts, params)]


def _transformers_tokens(rig: Rig, path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32, attn_implementation="eager")
    model = model.to(rig.device).eval()
    found: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=rig.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(out[0, len(prompt) :].tolist())
    return found


# ---------------------------------------------------------------------------------------------------------- the graphs
def graphs(rig: Rig) -> dict[str, Any]:
    """Decode steps by graphs and without: the same ids, for lengths that change, and no wait for the device."""
    shape = rig.shape(LLAMA_1B)
    dtype = rig.pick(torch.bfloat16, torch.float32)
    num_rows, contexts = rig.pick(32, 4), rig.pick([40, 2000, 513], [20, 45])
    model = rig.make_model(shape, max_position=4096, dtype=dtype)
    ids: dict[bool, list[list[int]]] = {}
    num_steps = rig.pick(8, 2)
    for with_graphs in (False, True):
        runner = rig.make_runner(
            model,
            dtype=dtype,
            num_blocks=rig.pick(4200, 40),
            max_num_seqs=num_rows,
            max_num_batched_tokens=128,
            max_model_len=max(contexts) + num_steps + 2,
            sizes=[1, num_rows] if with_graphs else [],
        )
        for cache in runner.kv_caches:
            cache.normal_(std=0.5, generator=torch.Generator(rig.device).manual_seed(1))
        ids[with_graphs] = [
            _run(rig, runner, rows, context, num_steps) for context in contexts for rows in (1, num_rows)
        ]
    same = ids[True] == ids[False]
    distinct = len({token for run in ids[True] for token in run})
    return {"same_ids": same, "distinct_ids": distinct, "passed": same and distinct > 2}


def _run(rig: Rig, runner: ModelRunner, num_rows: int, context: int, num_steps: int) -> list[int]:
    steps = decode_steps(runner, num_rows=num_rows, context=context, num_steps=num_steps)
    results = [runner.execute(steps[0])]
    with _no_waiting(rig):
        results += [runner.execute(step) for step in steps[1:]]
    tokens = [token for result in results for token in result.result().token_ids]
    runner.batch.apply(SchedulerOutput(0, [], [], 0, freed_slots=list(range(num_rows))))
    return tokens


class _no_waiting:  # noqa: N801
    """Within it, torch raises where the host would wait for a GPU."""

    def __init__(self, rig: Rig) -> None:
        self._is_gpu = not rig.rehearse

    def __enter__(self) -> None:
        if self._is_gpu:
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        if self._is_gpu:
            torch.cuda.set_sync_debug_mode("default")


# --------------------------------------------------------------------------------------------------------- the sampler
def sampler(rig: Rig) -> dict[str, Any]:
    """Ids drawn on the device equal those of the CPU for the same logits and numbers; and what each path costs."""
    vocab, num_rows = rig.pick((128256, 256), (600, 6))
    paths: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "plain": {"temperature": 0.8},
        "min_p": {"temperature": 1.0, "min_p": 0.02},
        "top_k": {"temperature": 0.7, "top_k": 50},
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "all": {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
    }
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(3)) * 2.5
    found: dict[str, Any] = {}
    for name, options in paths.items():
        params = [sampling(seed=row, **options) for row in range(num_rows)]
        on_cpu = _drawer(torch.device("cpu"), torch.from_numpy, vocab, params)
        on_device = _drawer(rig.device, rig.runtime().upload, vocab, params)
        there = logits.to(rig.device)
        want, got = on_cpu(logits.clone()), on_device(there.clone()).cpu()
        cost = timed(rig, lambda draw=on_device, there=there: draw(there), rounds=rig.pick(20, 1))
        found[name] = {"differ": int((want != got).sum()), "median_ms": round(cost.median_s * 1e3, 3)}
    differ = sum(path["differ"] for path in found.values())
    # A number within rounding of the border between two tokens may fall to either side.
    return {"rows": num_rows, "vocab": vocab, "paths": found, "passed": differ <= max(1, num_rows // 100)}


def _drawer(device: torch.device, upload: Any, vocab: int, params: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    num_rows = len(params)
    columns = SamplingColumns(num_rows, vocab_size=vocab, eos_token_ids=(2,), upload=upload)
    for row, one in enumerate(params):
        columns.put(row, one)
    slots = np.arange(num_rows)
    metadata = columns.select(slots)
    positions = np.zeros(num_rows, np.int64)
    numbers = uniforms(metadata.parameters["seed"], metadata.parameters["sample_index"], positions)
    tokens = torch.zeros((num_rows, 4), dtype=torch.int64, device=device)
    history = TokenHistory(tokens, slots, positions + 1, positions + 1, upload(numbers))
    drawer = Sampler(device_draw=make_device_draw(device, upload))
    return lambda logits: drawer.sample(logits, metadata, history).token_ids
