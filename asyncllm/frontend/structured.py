"""What a structured output has to match, as the engine is told of it, and its text as an object.

Here: schemas of types, choices as a regular expression, the JSON as an object. Not here: what only
compiling shows (:mod:`asyncllm.structured`), which the engine answers. Neither pydantic nor the grammar library is
imported: a pydantic class brings its own methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import msgspec

from asyncllm.errors import InvalidParameterError, shown
from asyncllm.sampling_params import MAX_STRUCTURE_CHARS, SamplingParams
from asyncllm.wire.messages import Grammar

__all__ = ["is_long_structure", "make_grammar", "parse_output", "schema_grammar"]

LONG_STRUCTURE_CHARS = 100_000
"""Reading a schema of this length takes about a millisecond."""
MAX_KEPT = 256

_type_to_schema: dict[Any, str] = {}
"""Schemas of types met lately: making one takes pydantic up to some milliseconds."""


def is_long_structure(params: SamplingParams) -> bool:
    """Return whether :func:`make_grammar` takes so long that an event loop should leave it to a thread. O(choices)."""
    if params.choice is not None:
        return sum(map(len, params.choice)) >= LONG_STRUCTURE_CHARS // 10
    schema = params.schema
    if isinstance(schema, str):
        return len(schema) >= LONG_STRUCTURE_CHARS
    return schema is not None and not isinstance(schema, Mapping) and _kept_schema(schema) is None


def make_grammar(params: SamplingParams) -> Grammar | None:
    """Return what the output has to match, ``None`` if anything will do.

    :raises InvalidParameterError: ``schema`` is no JSON object, or no schema can be made of the type.
    """
    name = params.structure
    if name is None:
        return None
    if name == "schema":
        return Grammar(name, "schema", _schema_text(params.schema))
    if name == "json_object":
        return Grammar(name, "schema", '{"type":"object"}')
    if name == "choice":
        return Grammar(name, "regex", "|".join(map(_escaped, params.choice or ())))
    return Grammar(name, name, getattr(params, name))


def schema_grammar(parameter: str, schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema that another ``parameter`` implies (a tool call that is demanded).

    :raises InvalidParameterError: it is not plain JSON, or too long.
    """
    return Grammar(parameter, "schema", _encoded(schema, schema, parameter))


def parse_output(params: SamplingParams, text: str, *, is_cut: bool) -> tuple[Any, str | None]:
    """Return the object that ``text`` says, and else why there is none; nothing at all where no JSON was asked for.

    ``is_cut``: the output did not end by itself; it may be whole even so. Takes about 5 ns a character, and for a
    pydantic type what its own validators take.
    """
    if params.schema is None and not params.json_object:
        return None, None
    if not params.detokenize:
        return None, "there is no text with detokenize=False"
    try:
        return _parse(params.schema, text), None
    except Exception as error:  # pydantic's and msgspec's own, and whatever a validator of the caller's raises
        if is_cut:
            return None, "the output was cut off before its end"
        return None, f"{type(error).__name__}: {shown(str(error), max_chars=1000)}"


def _parse(schema: Any, text: str) -> Any:
    if schema is None or isinstance(schema, (Mapping, str)):
        return msgspec.json.decode(text)
    for method in ("model_validate_json", "validate_json"):  # a pydantic model, a pydantic TypeAdapter
        if hasattr(schema, method):
            return getattr(schema, method)(text)
    return msgspec.json.decode(text, type=schema)


# ------------------------------------------------------------------------------------------------------------ schemas
def _schema_text(schema: Any) -> str:
    """Return ``schema``, of any form that the caller may give, as JSON."""
    if isinstance(schema, str):
        try:
            found = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            _refuse(schema, f"JSON ({error})")
        if not isinstance(found, dict):
            _refuse(schema, "a JSON object")
        return schema
    if isinstance(schema, Mapping):
        return _encoded(schema, cast("object", schema))
    kept = _kept_schema(schema)
    if kept is None:
        kept = _encoded(_closed(_schema_of_type(schema)), schema)
        if len(_type_to_schema) >= MAX_KEPT:
            _type_to_schema.clear()
        with contextlib.suppress(TypeError):  # not hashable: made anew each time
            _type_to_schema[schema] = kept
    return kept


def _kept_schema(schema: Any) -> str | None:
    try:
        return _type_to_schema.get(schema)
    except TypeError:
        return None


def _schema_of_type(schema: Any) -> Any:
    try:
        for method in ("model_json_schema", "json_schema"):  # a pydantic model, a pydantic TypeAdapter
            if hasattr(schema, method):
                return getattr(schema, method)()
        return msgspec.json.schema(schema)
    except Exception as error:
        _refuse(schema, f"a type that a JSON schema can be made of ({type(error).__name__}: {error})")


def _closed(schema: Any) -> Any:
    """Return the schema of a type with no properties but those of the type: a parser would drop all others.

    Where ``allOf`` joins schemas, each of them would have to leave room for the others: there nothing is closed.
    """
    if isinstance(schema, list):
        return [_closed(entry) for entry in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _closed(value) for key, value in cast("Mapping[str, Any]", schema).items() if key != "allOf"}
    if "allOf" in schema:
        found["allOf"] = schema["allOf"]
    elif found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


def _encoded(schema: Any, given: object, parameter: str = "schema") -> str:
    try:
        text = msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        _refuse(given, f"plain JSON ({type(error).__name__}: {error})", parameter)
    if len(text) > MAX_STRUCTURE_CHARS:
        _refuse(given, f"at most {MAX_STRUCTURE_CHARS} characters of JSON", parameter)
    return text


def _escaped(text: str) -> str:
    """Return a regular expression that matches ``text`` alone."""
    return "".join(c if c.isalnum() or c > "\x7f" else rf"\x{{{ord(c):X}}}" for c in text)


def _refuse(schema: object, limit: str, parameter: str = "schema") -> NoReturn:
    value = shown(schema)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=shown(limit)
    )
