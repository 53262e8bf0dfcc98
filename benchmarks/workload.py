"""The prompts that every engine of a comparison gets: token ids, cut from the documentation of the standard library.

Which ids depends on the tokenizer and on the Python version, and on nothing else. No two prompts begin alike, so that a
prefix cache gives nobody a hit.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from asyncllm.checkpoint import open_checkpoint
from asyncllm.frontend.tokenizer import Tokenizer

MODULES = (
    "argparse asyncio collections csv datetime decimal difflib email.message fractions functools heapq inspect json "
    "logging pathlib pickle random statistics string subprocess textwrap threading unittest urllib.parse uuid "
    "zipfile"
)
DISTINCT_TOKENS = 16  # of a prompt's beginning that no other prompt has


@dataclass(frozen=True)
class Case:
    """So many requests at once, each of so many prompt tokens and so many output tokens."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    repeats: int = 1

    @property
    def kv_tokens(self) -> int:
        return self.streams * (self.prompt_tokens + self.output_tokens)


class Prompts:
    """An endless supply of prompts for the model at ``path``."""

    def __init__(self, path: str) -> None:
        self._ids = Tokenizer.from_checkpoint(open_checkpoint(path)).encode(documentation(), add_special_tokens=False)
        self._used: set[tuple[int, ...]] = set()
        self._at = 0
        self._laps = 0

    def take(self, num_tokens: int) -> list[int]:
        """Return the next prompt of ``num_tokens`` ids."""
        while True:
            if self._at + num_tokens > len(self._ids):
                self._laps += 1
                self._at = self._laps  # the same text, cut elsewhere
            prompt = self._ids[self._at : self._at + num_tokens]
            self._at += num_tokens
            beginning = tuple(prompt[:DISTINCT_TOKENS])
            if beginning not in self._used:
                self._used.add(beginning)
                return prompt

    def of(self, case: Case) -> list[list[int]]:
        """Return one prompt for each stream of ``case``."""
        return [self.take(case.prompt_tokens) for _ in range(case.streams)]


def documentation() -> str:
    """Return what the standard library's modules say about their public functions, classes and methods."""
    parts: dict[str, None] = {}
    for name in MODULES.split():
        parts.update(dict.fromkeys(docstrings(importlib.import_module(name))))
    return "\n\n".join(part for part in parts if len(part) > 80)


def docstrings(module: object) -> Iterator[str]:
    yield inspect.getdoc(module) or ""
    for _, member in sorted(vars(module).items()):
        if inspect.isclass(member) or inspect.isfunction(member):
            yield inspect.getdoc(member) or ""
        if inspect.isclass(member):
            methods = (value for _, value in sorted(vars(member).items()) if inspect.isfunction(value))
            yield from (inspect.getdoc(method) or "" for method in methods)
