"""SmolLM2-135M-Instruct under grammars at temperature 1: every output is valid, and a seed gives the same ids anywhere.

The 200 schemas of the public suite are in benchmarks/structured_output.py; here is one for each of their kinds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from asyncllm import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORD = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer", "minimum": -50, "exclusiveMaximum": 7},
    "number": {"type": "number", "minimum": 0, "maximum": 1.5},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null"]},
    "length": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", 4, None, {"a": 1}]},
    "const": {"const": {"a": [1, "é"]}},
    "array": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    "object": {"type": "object", "properties": {"a": WORD, "b": {"type": "boolean"}}, "required": ["b"],
               "additionalProperties": False},
    "additional": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "bb"],
                   "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "patterns": {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}, "minProperties": 1,
                 "maxProperties": 2, "additionalProperties": False},
    "any of": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 20}, {"const": "none"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "one of": {"oneOf": [{"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"],
                          "additionalProperties": False} for k in ("cat", "dog")]},
    "reference": {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
        "required": ["v", "next"], "additionalProperties": False}, "leaf": {"const": 1}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(smollm2_gguf, in_process=True, num_threads=1, max_model_len=1024) as llm:
        yield llm


def options(**fields: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": 5, "max_tokens": 60, **fields}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_is_valid(llm: LLM, name: str) -> None:
    schema = SCHEMAS[name]
    [done] = llm.chat([{"role": "user", "content": "Write some JSON."}], schema=schema, n=3, **options())
    for sample in done.samples:
        assert sample.parsed == json.loads(sample.text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(
            sample.parsed
        )


def test_a_seed_gives_the_same_ids_alone_and_in_a_batch(llm: LLM) -> None:
    prompts = ["The number is", "A colour:", "Call me at"]
    params = [{"regex": r"[0-9]{3}-[0-9]{4}"}, {"choice": ["red", "green", "blue"]}, {"schema": SCHEMAS["object"]}]

    wanted = [SamplingParams(**options(**fields)) for fields in params]
    together = llm.generate([*prompts, "Once upon a time"], [*wanted, SamplingParams(max_tokens=20)])
    for prompt, one, before in zip(prompts, wanted, together, strict=False):
        [alone] = llm.generate(prompt, one)
        assert alone.token_ids == before.token_ids


def test_greedy_follows_the_grammar_too(llm: LLM) -> None:
    [done] = llm.generate("The capital of France is", regex="[0-9]{3}", temperature=0)
    assert re.fullmatch("[0-9]{3}", done.text)


def test_other_options_work_under_a_grammar(llm: LLM) -> None:
    [done] = llm.generate("Letters:", regex="[a-c]{8}", bad_words=["a"], logit_bias={}, min_tokens=50, **options())
    assert re.fullmatch("[abc]{8}", done.text)
    assert done.token_ids[0] not in llm.generate("a", max_tokens=1)[0].prompt_token_ids
    [done] = llm.generate("Letters:", regex="[a-c]{8}", logprobs=2, frequency_penalty=1.0, **options())
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids)
