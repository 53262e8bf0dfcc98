"""Outputs end whole within ``max_tokens``, whatever is drawn on the way."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from asyncllm.frontend.structured import make_grammar
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.matcher import Matcher
from asyncllm.testing.tiny_checkpoint import EOS
from asyncllm.wire.messages import EngineCoreRequest, EngineSampling, RareSampling
from tests.support.engines import scripted_config

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "born": {"type": "string", "format": "date"}},
    "required": ["name", "born"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {},
    "object": {"type": "object"},
    "number": {"type": "number", "exclusiveMinimum": 0},
    "numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 1, "maximum": 9}},
    "nested": {"type": "array", "items": {"type": "array", "items": {"type": "array"}}},
    "person": PERSON,
    "address": {"type": "string", "format": "email"},
    "people": {"type": "array", "items": {"type": "object", "properties": {"a": {"const": 1}, "b": {}}}, "minItems": 3},
}


def draw(
    tmp_path: Path, max_tokens: int, seeds: range, *, sampling: dict[str, Any] | None = None, **structure: Any
) -> list[tuple[bytes, Matcher, int]]:
    """Return outputs that are drawn evenly among what is allowed: text, matcher, number of tokens."""
    compiler = GrammarCompiler(scripted_config(tmp_path), vocab_size=260, eos_token_ids=[EOS])
    grammar = make_grammar(SamplingParams(**structure))
    params = EngineSampling(max_tokens, rare=RareSampling(grammar=grammar), **(sampling or {}))
    found: list[tuple[bytes, Matcher, int]] = []
    for seed in seeds:
        compiler.submit(EngineCoreRequest(seed, [1], params))
        compiler.wait()
        ((_, matcher),) = compiler.take()
        assert isinstance(matcher, Matcher), matcher
        chance, text = random.Random(seed), b""
        for num_left in range(max_tokens - 1, -1, -1):
            mask = matcher.mask
            token = chance.choice([i for i in range(260) if mask[i >> 3] >> (i & 7) & 1])
            if token == EOS:
                break
            text += bytes([token])
            if matcher.follow(token, num_left):
                break
        found.append((text, matcher, max_tokens - num_left))
    compiler.shutdown()
    return found


@pytest.mark.parametrize("max_tokens", [48, 100, 300])
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_whole_however_little_room_there_is(name: str, max_tokens: int, tmp_path: Path) -> None:
    for text, matcher, num_tokens in draw(tmp_path, max_tokens, range(25), schema=SCHEMAS[name]):
        assert num_tokens <= max_tokens
        assert matcher.may_end, text
        jsonschema.validate(json.loads(text), SCHEMAS[name])


def test_an_end_that_was_forced_is_told_from_one_that_came(tmp_path: Path) -> None:
    [(text, forced, _)] = draw(tmp_path, 30, range(1), regex="a{20,}b")
    assert (text, forced.is_shortened) == (b"a" * len(text[:-1]) + b"b", True) or not forced.is_shortened
    [(text, came, _)] = draw(tmp_path, 300, range(1), regex="a{20}b")
    assert (text, came.is_shortened) == (b"a" * 20 + b"b", False)


def test_a_pattern_is_closed_too(tmp_path: Path) -> None:
    for text, _, _ in draw(tmp_path, 40, range(20), regex=r"([0-9]{4}-)+x"):
        assert re.fullmatch(rb"([0-9]{4}-)+x", text)


def test_where_the_shortest_end_does_not_fit_the_output_is_cut_off(tmp_path: Path) -> None:
    [(text, matcher, num_tokens)] = draw(tmp_path, 10, range(1), regex="a{50}")
    assert (text, num_tokens, matcher.may_end) == (b"a" * 10, 10, False)


def test_options_that_exclude_tokens_leave_the_end_alone(tmp_path: Path) -> None:
    """A token on the way to the end might be one of those."""
    [(_, matcher, _)] = draw(tmp_path, 20, range(1), sampling={"allowed_token_ids": [1]}, regex="(aaaaab?)+c")
    assert not matcher.is_shortened
