"""Put a scripted engine together: a temporary checkpoint, the options, an :class:`AsyncLLM` on them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.testing.tiny_checkpoint import write_tiny_checkpoint

if TYPE_CHECKING:
    from asyncllm.async_llm import AsyncLLM

__all__ = ["SCRIPTED_EXECUTOR", "scripted_llm", "scripted_options"]

SCRIPTED_EXECUTOR = "asyncllm.testing.ScriptedExecutor"

Reply = str | Sequence[int] | Sequence[str]


def scripted_options(replies: Mapping[str, Reply] | None = None, **script: Any) -> dict[str, Any]:
    """Return the engine options that select the scripted executor; ``script`` as for :class:`ScriptedExecutor`."""
    if replies is not None:
        script["replies"] = dict(replies)
    return {"executor": SCRIPTED_EXECUTOR, "executor_options": script}


@asynccontextmanager
async def scripted_llm(
    replies: Mapping[str, Reply] | None = None,
    *,
    script: Mapping[str, Any] | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> AsyncGenerator[AsyncLLM]:
    """Yield a started :class:`AsyncLLM` whose engine answers from ``replies``; closed on exit, nothing left on disk.

    ``replies`` maps a piece of a prompt to the text (or token ids) that answers it; a prompt with no match is echoed.
    ``script`` holds further options of :class:`ScriptedExecutor` (``step_ms``, ``fail_at_step`` …), ``checkpoint``
    arguments of :func:`write_tiny_checkpoint`, ``engine_options`` those of :class:`AsyncLLM`.
    """
    from asyncllm.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="asyncllm-test-") as folder:
        path = write_tiny_checkpoint(Path(folder), **(checkpoint or {}))
        options = scripted_options(replies, **(script or {})) | engine_options
        async with AsyncLLM(str(path), **options) as llm:
            yield llm
