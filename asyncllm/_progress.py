"""The progress bar of calls with many prompts. Importing tqdm takes time, so it is done when a bar is made."""

from __future__ import annotations

import sys
from typing import Any, cast

__all__ = ["make_bar"]


def make_bar(total: int | None, progress: bool | None) -> Any:
    """Return a progress bar on stderr, ``None`` where none is wanted (``progress=None``: on a terminal)."""
    if total == 0 or not (sys.stderr.isatty() if progress is None else progress):
        return None
    from tqdm import tqdm

    # Without a monitor_interval of 0, tqdm starts a thread that lives as long as the process.
    bar = type("Bar", (cast("type[Any]", tqdm),), {"monitor_interval": 0})
    return bar(total=total, unit="prompt", dynamic_ncols=True)
