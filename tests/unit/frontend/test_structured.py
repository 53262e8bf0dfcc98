"""What the engine is told of a structured output, what is refused before, and the text as an object."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest

from asyncllm.errors import InvalidParameterError
from asyncllm.frontend.structured import is_long_structure, make_grammar, parse_output
from asyncllm.sampling_params import SamplingParams
from tests.support.frontend import FrontEnd


class Model(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0)

    @pydantic.field_validator("name")
    @classmethod
    def not_nobody(cls, name: str) -> str:
        if name == "nobody":
            raise ValueError("nobody is nobody")
        return name


class Struct(msgspec.Struct):
    name: str
    age: Annotated[int, msgspec.Meta(ge=0)]


@dataclasses.dataclass
class Data:
    name: str
    age: int


class Typed(TypedDict):
    name: str
    age: int


TEXT = '{"name": "Ann", "age": 3}'
TYPES = [Model, Struct, Data, Typed, pydantic.TypeAdapter(Data)]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def schema_of(schema: Any) -> Any:
    grammar = make_grammar(params(schema=schema))
    assert grammar is not None
    assert (grammar.parameter, grammar.kind) == ("schema", "schema")
    return json.loads(grammar.text)


# -------------------------------------------------------------------------------------------------------- the grammar
@pytest.mark.parametrize("schema", TYPES, ids=["pydantic", "Struct", "dataclass", "TypedDict", "TypeAdapter"])
def test_types_become_schemas_with_no_other_properties(schema: Any) -> None:
    found = schema_of(schema)
    found = next(iter(found["$defs"].values())) if "$defs" in found else found
    assert sorted(found["properties"]) == sorted(found["required"]) == ["age", "name"]
    assert found["additionalProperties"] is False


def test_a_schema_is_taken_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    assert schema_of(schema) == schema_of(json.dumps(schema)) == schema


def test_other_forms() -> None:
    forms = [{"json_object": True}, {"regex": "a+"}, {"grammar": "start: x"}, {"choice": ["a.b", "é"]}]
    found = [make_grammar(params(**form)) for form in forms]
    assert [grammar and (grammar.kind, grammar.text) for grammar in found] == [
        ("schema", '{"type":"object"}'),
        ("regex", "a+"),
        ("grammar", "start: x"),
        ("regex", r"a\x{2E}b|é"),
    ]
    assert make_grammar(params()) is None


def test_a_type_met_before_is_no_long_work() -> None:
    class New(msgspec.Struct):
        a: int

    assert is_long_structure(params(schema=New))
    make_grammar(params(schema=New))
    assert not is_long_structure(params(schema=New))
    assert is_long_structure(params(schema=" " * 200_000))
    assert not is_long_structure(params(schema={"type": "object"}))
    assert is_long_structure(params(choice=["a" * 20_000]))


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"regex": ""}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"grammar": 5}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["yes", ""]}, "choice"),
        ({"schema": ["a"]}, "schema"),
        ({"schema": True}, "schema"),
        ({"json_object": 1}, "json_object"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"schema": {}, "json_object": True}, "json_object"),
    ],
)
def test_parameters_that_cannot_be_are_refused(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        params(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("schema", ["{", "[]", "5", {"a": object()}, object, lambda: None])
def test_what_is_no_schema_is_refused_with_the_request(schema: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        FrontEnd(tmp_path).input.process("Hi", params(schema=schema))
    assert caught.value.parameter == "schema"


def test_a_schema_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidParameterError, match="plain JSON"):
        make_grammar(params(schema=schema))


def test_all_samples_carry_it(tmp_path: Path) -> None:
    done = FrontEnd(tmp_path).input.process("Hi", params(regex="a", n=2))
    assert [request.sampling.grammar for request in done.requests] == [make_grammar(params(regex="a"))] * 2


# --------------------------------------------------------------------------------------------------------- the object
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Model, Model(name="Ann", age=3)),
        (Struct, Struct("Ann", 3)),
        (Data, Data("Ann", 3)),
        (Typed, {"name": "Ann", "age": 3}),
        (pydantic.TypeAdapter(Data), Data("Ann", 3)),
        ({"type": "object"}, {"name": "Ann", "age": 3}),
        ('{"type": "object"}', {"name": "Ann", "age": 3}),
    ],
)
def test_the_text_becomes_an_object_of_the_type(schema: Any, expected: Any) -> None:
    assert parse_output(params(schema=schema), TEXT, is_cut=False) == (expected, None)


def test_types_that_are_no_objects() -> None:
    assert parse_output(params(schema=Literal["a", "b"]), '"a"', is_cut=False) == ("a", None)
    assert parse_output(params(schema=list[int]), "[1, 2]", is_cut=False) == ([1, 2], None)
    assert parse_output(params(json_object=True), "{}", is_cut=False) == ({}, None)


@pytest.mark.parametrize(
    ("fields", "text", "is_cut", "says"),
    [
        ({"schema": Model}, '{"name": "nobody", "age": 3}', False, "nobody is nobody"),
        ({"schema": Struct}, '{"name": "Ann", "age": -3}', False, "ValidationError"),
        ({"schema": Struct}, '{"name": "An', True, "cut off"),
        ({"schema": Struct, "detokenize": False}, "", False, "detokenize"),
    ],
)
def test_why_there_is_no_object(fields: dict[str, Any], text: str, is_cut: bool, says: str) -> None:
    parsed, error = parse_output(params(**fields), text, is_cut=is_cut)
    assert parsed is None
    assert error is not None
    assert says in error


def test_other_outputs_are_not_parsed() -> None:
    assert parse_output(params(regex="1"), "1", is_cut=False) == (None, None)
