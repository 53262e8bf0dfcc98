"""What do quantized weights and smaller KV caches cost in accuracy, on a fixed text?

    python benchmarks/accuracy.py --model FOLDER [--gguf FILE] [--variants NAME ...] [--tokens 8192]

The text is the Constitution of the United States with its amendments (public domain, ``text/``), cut into windows that
share nothing; its perplexity comes from ``prompt_logprobs`` of the public API. "same_argmax" is the share of positions
at which a variant finds the same token most likely as the exact mode of the same file does, given the same text before
it; "same_greedy" counts the prompts whose greedy continuations are equal in every token. The table on stderr has one
line per variant; what this engine does not know, or cannot do with this model, is skipped with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

from asyncllm import AsyncLLM, AsyncLLMError, SamplingParams
from asyncllm.checkpoint import open_checkpoint
from asyncllm.frontend.tokenizer import Tokenizer

TEXT = Path(__file__).resolve().parent / "text" / "us-constitution.txt"
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Variant:
    """An engine to measure: which file it reads, its options, and the variant that is its exact mode."""

    source: str
    options: dict[str, Any]
    exact: str


@dataclass
class Observed:
    """What an engine said of the text: log-probability and most likely id at each position, greedy continuations."""

    logprobs: list[float]
    argmaxes: list[int]
    greedy: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


def all_variants() -> dict[str, Variant]:
    """Return every variant by name; an exact mode comes before what is compared with it."""
    variants = {"exact": Variant("model", {}, "exact")}
    for quantization in ("int8", "int4"):
        variants[quantization] = Variant("model", {"quantization": quantization}, "exact")
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        variants[f"kv-{dtype}"] = Variant("model", {"kv_cache_dtype": dtype}, "exact")
    variants["int8-kv-int8"] = Variant("model", {"quantization": "int8", "kv_cache_dtype": "int8"}, "exact")
    variants["gguf"] = Variant("gguf", {}, "gguf")
    variants["gguf-int8"] = Variant("gguf", {"quantization": "int8"}, "gguf")
    return variants


async def observe(variant: Variant, args: argparse.Namespace, windows: list[list[int]]) -> Observed:
    """Return what the engine of ``variant`` says.

    :raises AsyncLLMError: it does not know an option, or cannot run this model with it.
    """
    size = len(windows[0])
    options = {"max_model_len": max(size, PROMPT_TOKENS + args.greedy_tokens) + 1, "max_num_seqs": 16}
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True, detokenize=False)
    go_on = SamplingParams(temperature=0, max_tokens=args.greedy_tokens, ignore_eos=True, detokenize=False)
    observed = Observed([], [], [])
    async with AsyncLLM(getattr(args, variant.source), **options | variant.options) as llm:
        for window in windows:
            scored = (await llm.generate(window, score)).prompt_logprobs
            assert scored is not None
            for position in scored[1:]:  # nothing predicts the first token
                assert position is not None
                observed.logprobs.append(position.chosen.logprob)
                observed.argmaxes.append(position.top[0].token_id)
        beginnings = [window[:PROMPT_TOKENS] for window in windows]
        done = await asyncio.gather(*(llm.generate(beginning, go_on) for beginning in beginnings))
        observed.greedy = [completion.token_ids for completion in done]
    return observed


def compared(observed: Observed, exact: Observed) -> dict[str, Any]:
    """Return the figures of one variant."""
    argmaxes = zip(observed.argmaxes, exact.argmaxes, strict=True)
    continuations = zip(observed.greedy, exact.greedy, strict=True)
    distances = (abs(a - b) for a, b in zip(observed.logprobs, exact.logprobs, strict=True))
    return {
        "positions": len(observed.logprobs),
        "perplexity": round(observed.perplexity, 4),
        "perplexity_change_percent": round((observed.perplexity / exact.perplexity - 1) * 100, 3),
        "mean_logprob_distance": round(math.fsum(distances) / len(exact.logprobs), 5),
        "same_argmax": round(sum(a == b for a, b in argmaxes) / len(exact.argmaxes), 5),
        "same_greedy": sum(a == b for a, b in continuations),
        "prompts": len(exact.greedy),
    }


async def measure(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(args.model))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[: args.tokens]
    windows = [ids[at : at + args.window] for at in range(0, len(ids) - args.window + 1, args.window)]
    if not windows or args.window < PROMPT_TOKENS:
        sys.exit(f"--window {args.window} does not fit {len(ids)} tokens of text, or is less than {PROMPT_TOKENS}")
    variants, observed = all_variants(), dict[str, Observed]()
    figures: dict[str, Any] = {}
    for name in names:
        variant = variants[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        if getattr(args, variant.source) is None:
            figures[name] = {"skipped": f"it reads --{variant.source}, which is not given"}
            continue
        try:
            observed[name] = await observe(variant, args, windows)
        except AsyncLLMError as error:
            if name == variant.exact:  # nothing to compare with
                raise
            figures[name] = {"skipped": f"{type(error).__name__}: {error}"}
            continue
        figures[name] = compared(observed[name], observed[variant.exact])
    return figures


def table(figures: dict[str, Any]) -> str:
    lines = ["| variant | perplexity | change | same argmax | same greedy text |", "|---|---|---|---|---|"]
    for name, found in figures.items():
        if "skipped" in found:
            lines.append(f"| {name} | skipped: {found['skipped']} |")
        else:
            cells = [f"{found['perplexity']:.3f}", f"{found['perplexity_change_percent']:+.2f} %"]
            cells += [f"{found['same_argmax']:.2%}", f"{found['same_greedy']} of {found['prompts']}"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    variants = all_variants()
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--gguf", help="the same model as a .gguf file")
    parser.add_argument("--variants", nargs="*", choices=list(variants), default=list(variants), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text, at most")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--greedy-tokens", type=int, default=64)
    args = parser.parse_args()
    wanted = {variants[name].exact for name in args.variants} | set(args.variants)
    figures = asyncio.run(measure([name for name in variants if name in wanted], args))
    print(table(figures), file=sys.stderr)
    report.emit("accuracy", figures, args)


if __name__ == "__main__":
    main()
