"""How much sooner is the first token when the prompt's beginning is in the prefix cache?

    python benchmarks/ttft_prefix.py [--model FILE] [--lengths 64 128 256 512 1024] [--plot FILE]

For each length, prompts of random ids that end in 8 ids of their own: "cold" with a beginning never seen, "warm" with
the same beginning and another end. Time from `stream()` to the first item, one request at a time; cold and warm in
turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import report

from asyncllm import AsyncLLM, SamplingParams

TAIL = 8


async def first_token_s(llm: AsyncLLM, prompt: list[int]) -> tuple[float, int]:
    """Return seconds to the first item, and how many prompt tokens came from the cache."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    begun = time.perf_counter()
    async with llm.stream(prompt, params) as stream:
        await anext(stream)
        took = time.perf_counter() - begun
        return took, (await stream.completion()).usage.cached_tokens


async def measure(args: Any) -> dict[str, Any]:
    draw = random.Random(0)
    figures: dict[str, Any] = {}
    async with AsyncLLM(args.model, max_model_len=max(args.lengths) + 16) as llm:
        ids = range(llm.info.vocab_size // 4, llm.info.vocab_size * 3 // 4)  # no special tokens
        await first_token_s(llm, draw.choices(ids, k=32))
        for length in args.lengths:
            cold, warm, cached = [], [], 0
            for _ in range(args.rounds):
                beginning = draw.choices(ids, k=length - TAIL)
                cold.append((await first_token_s(llm, beginning + draw.choices(ids, k=TAIL)))[0])
                took, cached = await first_token_s(llm, beginning + draw.choices(ids, k=TAIL))
                warm.append(took)
            figures[str(length)] = {
                "cold_ms": report.spread([s * 1e3 for s in cold], 1),
                "warm_ms": report.spread([s * 1e3 for s in warm], 1),
                "cached_tokens": cached,
            }
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True, plot=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    figures = asyncio.run(measure(args))
    report.emit("ttft_prefix", figures, args)
    if args.plot:
        curves = {kind: [row[f"{kind}_ms"]["median"] for row in figures.values()] for kind in ("cold", "warm")}
        labels = {"x_label": "prompt tokens", "y_label": "ms to the first token", "title": "Time to first token"}
        report.draw(args.plot, args.lengths, curves, **labels)


if __name__ == "__main__":
    main()
