"""What all benchmarks share: their arguments, the one JSON line they print, and an optional plot. No engine in here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SMOLLM2 = REPOSITORY / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def parser(description: str, *, model: bool = False, plot: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the arguments that benchmarks share."""
    made = argparse.ArgumentParser(description=description.strip().splitlines()[0])
    made.add_argument("--out", type=Path, help="append the JSON line to this file too")
    if model:
        made.add_argument(
            "--model", default=str(SMOLLM2), help="folder or .gguf file; default: what `make model` brings"
        )
    if plot:
        made.add_argument("--plot", type=Path, help="draw the curve into this .svg or .png file (needs matplotlib)")
    return made


def emit(benchmark: str, figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Print one JSON line: what was measured, where and when."""
    line = json.dumps(
        {
            "benchmark": benchmark,
            "at": time.strftime("%Y-%m-%d %H:%M"),
            "machine": machine(),
            "commit": commit(),
            "arguments": arguments(),
            "figures": figures,
        }
    )
    print(line, flush=True)
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as results:
            results.write(line + "\n")


def arguments() -> str:
    """Return the command's arguments without the folders of this machine."""
    kept = [argument for i, argument in enumerate(sys.argv) if i and "--out" not in (argument, sys.argv[i - 1])]
    return " ".join(re.sub(r"(^|=)/.*/", r"\1", argument) for argument in kept)


def options(text: str) -> dict[str, Any]:
    """Return the engine options in ``name=value,name=value``; a value is the JSON that it is, else text."""
    found: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, kernels, usable cores, how busy the machine is, Python."""
    told: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else ():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in told.get("flags", "").split()]
    return {
        "cpu": told.get("model name") or platform.processor(),
        "vectors": " ".join(vectors),
        "kernels": kernels(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def kernels() -> str:
    """Return which CPU kernels a worker would choose here; say loudly where that is the slow fallback."""
    from asyncllm.kernels.selector import describe_kernels

    found = describe_kernels()
    if not found.startswith("native"):
        print(f"WARNING: these figures are not those of the product: {found}", file=sys.stderr, flush=True)
    return found


def commit() -> str | None:
    """Return the short commit of the working tree, with a + if it was changed; ``None`` outside a repository."""
    git = ["git", "-C", str(REPOSITORY)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return None
    dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return found.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def quantile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of the sorted values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Return median, lowest and highest."""
    return {
        "median": round(quantile(values, 0.5), digits),
        "lowest": round(min(values), digits),
        "highest": round(max(values), digits),
    }


def draw(
    path: Path,
    x: list[float],
    curves: dict[str, list[float]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    log: bool = True,
) -> None:
    """Draw ``curves`` over ``x`` into ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for label, values in curves.items():
        axes.plot(x, values, marker="o", label=label)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
