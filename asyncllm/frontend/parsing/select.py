"""Which parsers read a model's output: told by the caller, or seen in the chat template and the tokenizer.

A template shows how the calls of earlier turns are written, so the model writes its own the same way.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from asyncllm.frontend.parsing.reasoning import REASONING_MARKERS, ReasoningParser
from asyncllm.frontend.parsing.spans import ContentParser
from asyncllm.frontend.parsing.tools import TOOL_PARSERS, ForcedCallsParser
from asyncllm.frontend.tokenizer import NO_IDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.frontend.parsing.spans import OutputParser
    from asyncllm.frontend.tokenizer import Tokenizer

__all__ = ["OutputFormat", "detect_reasoning_parser", "detect_tool_parser", "shown_ids"]

UNREADABLE = "<function="
"""Qwen 3 Coder's calls: XML between the markers that others put JSON between."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputFormat:
    """How the output of one request is read; every sample gets a parser of its own from it."""

    reasoning: tuple[str, str] | None = None
    """The markers around reasoning; ``None``: none is looked for."""
    is_reasoning_open: bool = False
    """The prompt ends inside the reasoning."""
    tool_parser: str | None = None
    """A name in ``TOOL_PARSERS``; ``None``: no calls are looked for."""
    tool_names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None
    """Where calls are demanded: what the whole output has to be. Then the two above do not matter."""
    forced_tool: str | None = None
    """The tool whose arguments that schema describes; ``None``: it describes a list of calls."""
    shown_ids: frozenset[int] = NO_IDS
    """Special tokens that are markers, and so part of the text."""

    def make_parser(self) -> OutputParser:
        """Return a parser at the start of the output."""
        if self.schema is not None:
            return ForcedCallsParser(self.forced_tool)
        parser = ContentParser() if self.tool_parser is None else TOOL_PARSERS[self.tool_parser](self.tool_names)
        if self.reasoning is None:
            return parser
        return ReasoningParser(self.reasoning, parser, is_open=self.is_reasoning_open)


def detect_tool_parser(template: str, tokenizer: Tokenizer) -> str | None:
    """Return the name of the parser for a model with this template and tokenizer, ``None`` if none is known."""
    if UNREADABLE in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    markers = (("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama3_json"))
    return next((name for marker, name in markers if tokenizer.token_id(marker) is not None), None)


def detect_reasoning_parser(template: str, tokenizer: Tokenizer) -> str | None:
    """Return the name of the markers that a model with this template and tokenizer puts around reasoning."""
    for name, markers in REASONING_MARKERS.items():
        if any(marker in template for marker in markers) or tokenizer.token_id(markers[0]) is not None:
            return name
    return None


def shown_ids(markers: Iterable[str], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of those ``markers`` that are special tokens, which the text would leave out."""
    ids = {tokenizer.token_id(marker) for marker in markers}
    return frozenset(token_id for token_id in ids if token_id in tokenizer.special_ids)
