"""What the output has to be where a tool call is demanded: the seam to structured output.

:func:`forced_schema` says it as a JSON schema; a grammar made of that schema has to constrain the whole output of the
request, and :class:`asyncllm.frontend.parsing.tools.ForcedCallsParser` reads what then comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from asyncllm.errors import InvalidParameterError, shown

__all__ = ["forced_schema", "named_tool", "tool_names"]

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
DEFINITION_KEYS = ("$defs", "definitions")
A_FUNCTION = 'the JSON schema of a function, {"type": "function", "function": {"name": …}}'


def forced_schema(tools: Sequence[Mapping[str, Any]], tool_name: str | None) -> dict[str, Any]:
    """Return the JSON schema of the output: the arguments of ``tool_name``, or for ``None`` a list of calls.

    A list has at least one ``{"name": …, "arguments": {…}}``, in this order of keys, each with a tool's own name and
    arguments. Definitions that tools refer to (``$defs``) come to the top under names of their own.
    """
    name_to_parameters = {_function(tool)["name"]: _parameters(tool) for tool in tools}
    if tool_name is not None:
        return name_to_parameters[tool_name]
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for index, (name, parameters) in enumerate(name_to_parameters.items()):
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _lifted(parameters, f"tool{index}.", definitions)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return {**schema, "$defs": definitions} if definitions else schema


def _lifted(parameters: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return ``parameters`` with its definitions moved into ``definitions``, and what refers to them changed."""
    own = {key: cast("dict[str, Any]", parameters[key]) for key in DEFINITION_KEYS if key in parameters}
    for schemas in own.values():
        definitions |= {prefix + name: _referring(schema, prefix) for name, schema in schemas.items()}
    return _referring({key: value for key, value in parameters.items() if key not in own}, prefix)


def _referring(schema: Any, prefix: str) -> Any:
    if isinstance(schema, list):
        return [_referring(item, prefix) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = {key: _referring(value, prefix) for key, value in cast("dict[str, Any]", schema).items()}
    reference = found.get("$ref")
    for key in DEFINITION_KEYS:
        if isinstance(reference, str) and reference.startswith(f"#/{key}/"):
            found["$ref"] = f"#/$defs/{prefix}{reference.removeprefix(f'#/{key}/')}"
    return found


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Return the names of the functions in ``tools``.

    :raises InvalidParameterError: one has no name.
    """
    names: list[str] = []
    for index, tool in enumerate(tools):
        name = _function(cast("Mapping[str, Any]", tool)).get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or not name:
            _refuse(f"tools[{index}]", cast("object", tool), A_FUNCTION)
        names.append(name)
    return names


def named_tool(choice: object, names: Sequence[str]) -> str:
    """Return the tool that ``tool_choice`` names: ``{"type": "function", "function": {"name": …}}`` or the bare name.

    :raises InvalidParameterError: it names none of ``names``.
    """
    name: object = choice
    if isinstance(choice, Mapping):  # of OpenAI's form
        mapping = cast("Mapping[str, Any]", choice)
        function: Any = mapping.get("function", mapping)
        name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        _refuse(
            "tool_choice",
            cast("object", choice),
            f"'auto', 'none', 'required' or one of the tools {', '.join(map(repr, names))}",
        )
    return name


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else tool


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _function(tool).get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return ANY_ARGUMENTS
    return dict(cast("Mapping[str, Any]", parameters))


def _refuse(parameter: str, value: object, limit: str) -> NoReturn:
    value = shown(value)
    raise InvalidParameterError(
        f"{parameter} is {value!r}; it must be {limit}", parameter=parameter, value=value, limit=limit
    )
