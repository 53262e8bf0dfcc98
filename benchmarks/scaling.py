"""What does a decode step cost as streams are added, and as contexts grow?

    python benchmarks/scaling.py [--model FILE] [--streams 1 2 4 ... 128] [--contexts 128 ... 8192] [--plot FILE]

Through ``AsyncLLM`` and its engine process. "streams" holds the context at ``--fixed-context`` tokens, "contexts"
holds the number of streams at ``--few-streams``. Each point is the median step in which all streams decode, and how
much of it is inside the forward pass. Every stream has a text of its own; a longer prompt begins with the shorter ones,
so that the prefix cache saves computing them again. Contexts beyond the model's positions are left out and named.
"""

from __future__ import annotations

import asyncio
from typing import Any

import report
from timed_worker import TIMED_WORKER, decode_together
from workload import Prompts

from asyncllm import AsyncLLM, SamplingParams


async def measure(llm: AsyncLLM, texts: list[list[int]], context: int, steps: int) -> dict[str, float]:
    """Return the step of as many streams as there are ``texts``, whose contexts end at ``context`` tokens."""
    prompts = [text[: context - steps] for text in texts]
    once = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    await asyncio.gather(*(llm.generate(prompt, once) for prompt in prompts))  # cached then: no prefill in between
    found = await decode_together(llm, prompts, steps)
    return found | {"tokens_per_s": round(len(texts) / found["step_ms"] * 1e3, 1)}


async def run(args: Any) -> dict[str, Any]:
    longest = max(args.fixed_context, *args.contexts)
    tokens = max(max(args.streams) * args.fixed_context, args.few_streams * longest)
    options = {
        "max_num_seqs": max(*args.streams, args.few_streams),
        "num_blocks": tokens // 16 + 2 * max(*args.streams, args.few_streams) + 1,
        "worker_cls": TIMED_WORKER,
    }
    figures: dict[str, Any] = {"fixed_context": args.fixed_context, "few_streams": args.few_streams}
    async with AsyncLLM(args.model, **options | report.options(args.options)) as llm:
        prompts, most = Prompts(args.model), llm.info.max_model_len
        texts = [prompts.take(args.fixed_context) for _ in range(max(args.streams))]
        figures["streams"] = {
            str(streams): await measure(llm, texts[:streams], args.fixed_context, args.steps)
            for streams in args.streams
        }
        fitting = [context for context in args.contexts if context <= most]
        figures["left_out_contexts"] = [context for context in args.contexts if context > most]
        long_texts = [prompts.take(max(fitting, default=1)) for _ in range(args.few_streams)]
        figures["contexts"] = {str(context): await measure(llm, long_texts, context, args.steps) for context in fitting}
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True, plot=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--fixed-context", type=int, default=256)
    parser.add_argument("--few-streams", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="decode steps per point")
    parser.add_argument("--options", default="", metavar="NAME=VALUE,...", help="further engine options")
    args = parser.parse_args()
    figures = asyncio.run(run(args))
    report.emit("scaling", figures, args)
    if args.plot:
        for name, label in (("streams", f"streams of {args.fixed_context} tokens"), ("contexts", "tokens of context")):
            points = figures[name]
            if points:
                curves = {key: [point[f"{key}_ms"] for point in points.values()] for key in ("step", "forward")}
                path = args.plot.with_stem(f"{args.plot.stem}-{name}")
                labels = {"x_label": label, "y_label": "ms per step", "title": f"Decode step against {name}"}
                report.draw(path, [float(x) for x in points], curves, **labels)


if __name__ == "__main__":
    main()
