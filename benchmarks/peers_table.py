"""The figures of ``peers.py`` for people: a Markdown table, the ratios of each round's pairs, and a bar chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MIB = 1 << 20
OURS = "asyncllm"


def table(figures: dict[str, Any], cases: list[str]) -> str:
    """Return the figures of every run, and how many times better than each other engine asyncllm was."""
    done = {name: found for name, found in figures.items() if "failed" not in found}
    columns = ["ready s", "first token s", *map(title, cases), "cancel ms: caller; freed", "peak RSS MiB"]
    columns += ["beyond weights and KV", "same ids", "other CPUs"]
    lines = ["| run | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, found in figures.items():
        if "failed" in found:
            lines.append(f"| {name} | {found['failed']} |")
        else:
            cells = [*start(found), *(cell(found, case) for case in cases), *rest(found, cases)]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ours = [name for name in done if name.startswith(OURS)]
    others = [name for name in done if name not in ours]
    if ours and others:
        lines += ["", "| times better | " + " | ".join(map(title, cases)) + " |", "|---" * (len(cases) + 1) + "|"]
        for us in ours:
            for other in others:
                cells = [spread(ratios(done[us], done[other], case), 2) for case in cases]
                lines.append(f"| {us} / {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(case: str) -> tuple[str, float, bool]:
    """Return which figure counts for ``case``, its scale in tables, and whether less is better."""
    if case == "first_token":
        return "first_token_s", 1000.0, True
    return ("decode_tokens_per_s" if case == "alone" else "output_tokens_per_s"), 1.0, False


def title(case: str) -> str:
    return {"alone": "alone tok/s", "first_token": "first token ms"}.get(case, f"{case.replace('_', ' ')} tok/s")


def values(found: dict[str, Any], case: str) -> list[float]:
    name, scale, _ = measure(case)
    return [one[case][name] * scale for one in found["rounds"] if name in one[case]]


def ratios(us: dict[str, Any], other: dict[str, Any], case: str) -> list[float]:
    """Return how many times better ``us`` was, round by round."""
    less = measure(case)[2]
    pairs = zip(values(us, case), values(other, case), strict=True)
    return [theirs / mine if less else mine / theirs for mine, theirs in pairs]


def spread(found: Iterable[float], digits: int) -> str:
    found = list(found)
    if not found:
        return "–"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(found), statistics.median(found), max(found)))
    return middle if low == high else f"{middle} ({low}–{high})"


def cell(found: dict[str, Any], case: str) -> str:
    figures = values(found, case)
    return spread(figures, 1 if figures and max(figures) < 100 else 0)


def start(found: dict[str, Any]) -> list[str]:
    return [f"{found['start'][name]:.1f}" for name in ("ready_s", "first_token_s")]


def rest(found: dict[str, Any], cases: list[str]) -> list[str]:
    cancelled = [one["cancel"] for one in found["rounds"] if one["cancel"]]
    times = ("; ".join(spread((c[key] * 1000 for c in cancelled), 2) for key in ("caller_s", "freed_s"))) or "–"
    peaks = found["start"]["peak_rss_bytes"]
    known = found["start"]["weights_bytes"] + found["start"]["memory"].get("kv_cache", 0)
    others = max(one[case]["other_cpus"] for one in found["rounds"] for case in cases)
    same = found.get("same_ids")
    share = f"{same['share']:.0%} ({same['before_difference']:.0%})" if same else "–"
    beyond = f"{(sum(peaks) - known) / MIB:.0f}" if found["start"]["memory"] else "–"
    return [times if cancelled else "–", f"{sum(peaks) / MIB:.0f}", beyond, share, f"{others:.2f}"]


def draw(path: Path, figures: dict[str, Any], cases: list[str]) -> None:
    """Draw one panel of bars per case into ``path``: medians, with lines from the lowest to the highest."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    done = {name: found for name, found in figures.items() if "failed" not in found}
    panels, grid = pyplot.subplots(1, len(cases), figsize=(3.2 * len(cases), 3.6), layout="constrained", squeeze=False)
    for axes, case in zip(grid[0], cases, strict=True):
        for place, (name, found) in enumerate(done.items()):
            rows = values(found, case)
            if rows:
                middle = statistics.median(rows)
                axes.barh(place, middle, color="tab:blue" if name.startswith(OURS) else "tab:gray")
                axes.plot([min(rows), max(rows)], [place, place], color="black", linewidth=1)
                axes.text(middle, place, f" {middle:.0f}", va="center", fontsize=8)
        axes.set_yticks(range(len(done)), list(done) if axes is grid[0][0] else [""] * len(done))
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_title(title(case) + (" (less is better)" if measure(case)[2] else ""), fontsize=9)
    panels.savefig(path)
    pyplot.close(panels)
