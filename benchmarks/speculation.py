"""What does prompt lookup (`prompt_lookup_num_tokens`) gain where an output repeats its prompt, and cost elsewhere?

    python benchmarks/speculation.py [--model FILE] [--streams 1 8] [--tokens 128] [--rounds 5] [--drafts 8]

One engine; rounds with and without lookup alternate, each is so many streams of at most so many tokens. "gain" is
tokens per second with lookup over those without it, the median over pairs of rounds; "cpu_gain" the same by the
processor time of the engine's process, which holds where other work disturbs the clock on the wall. "same" tells
whether all rounds gave the same tokens.

copy   go on with a paragraph that the prompt holds, greedy   edit   return a piece of code with a name changed, greedy
story  free text, drawn at temperature 1: nothing to copy     plain  free text, greedy: repeats itself here and there
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import report
from async_scheduling import cpu_s

from asyncllm import AsyncLLM, SamplingParams

TEXT = report.REPOSITORY / "benchmarks" / "text" / "us-constitution.txt"
CODE = """def read_table(path, separator=","):
    rows = []
    with open(path, encoding="utf-8") as file:
        names = file.readline().rstrip().split(separator)
        for line in file:
            values = line.rstrip().split(separator)
            rows.append(dict(zip(names, values)))
    return rows
"""
TASKS = ("copy", "edit", "story", "plain")
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(task: str, stream: int) -> str:
    """Return the prompt of one of several streams; no two are the same."""
    if task == "copy":
        paragraphs = [part for part in TEXT.read_text(encoding="utf-8").split("\n\n") if 500 < len(part) < 1200]
        paragraph = paragraphs[stream % len(paragraphs)]
        return f"{paragraph}\n\n" * 4 + paragraph[:60]
    if task == "edit":
        code = CODE.replace("rows", f"rows_{stream}")
        return CHAT.format(f"Rename the variable `values` to `cells` and write the whole code again:\n\n{code}")
    subject = ("a lighthouse", "two brothers", "a slow train", "the first snow", "an old map", "a violin")[stream % 6]
    return CHAT.format(f"Write story number {stream} about {subject}.")


async def one_round(llm: AsyncLLM, task: str, streams: int, num_tokens: int, num_drafts: int) -> dict[str, Any]:
    """Run the streams; return times per token in seconds, tokens, and counts of drafts."""
    spent, begun = cpu_s(llm.info.pid), time.perf_counter()
    done = await asyncio.gather(
        *(
            llm.generate(
                prompt_of(task, stream),
                SamplingParams(
                    temperature=1.0 if task == "story" else 0.0,
                    seed=stream,
                    max_tokens=num_tokens,
                    ignore_eos=task != "edit",
                    prompt_lookup_num_tokens=num_drafts,
                ),
            )
            for stream in range(streams)
        )
    )
    seconds, spent = time.perf_counter() - begun, cpu_s(llm.info.pid) - spent
    count = sum(completion.usage.completion_tokens for completion in done)
    return {
        "wall_s": seconds / count,
        "cpu_s": spent / count,
        "token_ids": [completion.token_ids for completion in done],
        "accepted": sum(completion.usage.accepted_draft_tokens for completion in done) / count,
        "proposed": sum(completion.usage.proposed_draft_tokens for completion in done) / count,
    }


async def measure_task(llm: AsyncLLM, task: str, streams: int, args: Any) -> dict[str, Any]:
    pairs: list[dict[int, dict[str, Any]]] = []
    for index in range(args.rounds + 1):
        order = (0, args.drafts) if index % 2 else (args.drafts, 0)
        found = {drafts: await one_round(llm, task, streams, args.tokens, drafts) for drafts in order}
        pairs += [found] if index else []  # the first warms up
    last = pairs[-1][args.drafts]
    return {
        "gain": round(report.quantile([pair[0]["wall_s"] / pair[args.drafts]["wall_s"] for pair in pairs], 0.5), 3),
        "cpu_gain": round(report.quantile([pair[0]["cpu_s"] / pair[args.drafts]["cpu_s"] for pair in pairs], 0.5), 3),
        "tokens_per_s": {
            name: round(1 / min(pair[drafts]["wall_s"] for pair in pairs), 1)
            for name, drafts in (("without", 0), ("with", args.drafts))
        },
        "proposed_per_token": round(last["proposed"], 3),
        "accepted_per_token": round(last["accepted"], 3),
        "same": all(found["token_ids"] == last["token_ids"] for pair in pairs for found in pair.values()),
    }


async def measure(args: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with AsyncLLM(args.model, **report.options(args.option)) as llm:
        for task in args.task:
            for streams in args.streams:
                figures[f"{task}_{streams}"] = await measure_task(llm, task, streams, args)
    return figures


def main() -> None:
    parser = report.parser(__doc__ or "", model=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--option", default="", help="NAME=VALUE,...: engine options")
    args = parser.parse_args()
    report.emit("speculation", asyncio.run(measure(args)), args)


if __name__ == "__main__":
    main()
