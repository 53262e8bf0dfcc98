"""A chat template's text compiled to what renders it, with what its text says about the messages that it takes.

The environment is that of transformers: a sandbox, trimmed blocks, ``loopcontrols``, ``raise_exception``,
``strftime_now``, ``tojson`` without HTML escapes, and ``{% generation %}`` blocks, which mean nothing here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    import jinja2  # noqa: TC004 - a field's type, which nobody evaluates
    from jinja2 import nodes
    from jinja2.parser import Parser

__all__ = ["CompiledTemplate", "InvalidTemplate", "TemplateRefusal", "compile_template"]

ARGUMENT_TEXT = re.compile(r"arguments\s*(\)|\|\s*\w+)*\s+is\s+(not\s+)?(string|mapping)")


class TemplateRefusal(Exception):
    """``raise_exception`` was called in a template; its text is the template's."""


class InvalidTemplate(Exception):
    """The text is not valid jinja; says what is wrong, and in which line."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledTemplate:
    """A template, ready to render."""

    template: jinja2.Template
    takes_parts: bool
    """It goes through contents that are lists of parts; else it expects a text."""
    takes_argument_text: bool
    """It tells arguments of tool calls that are JSON text from those that are objects."""


def compile_template(source: str) -> CompiledTemplate:
    """Return the compiled template; takes some milliseconds, and imports jinja2 the first time.

    :raises InvalidTemplate: the text is not valid jinja.
    """
    import jinja2

    environment = _environment()
    try:
        tree = environment.parse(source)
        takes_parts = _takes_parts(tree)
        template = environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidTemplate(f"{error} (line {error.lineno})") from error
    return CompiledTemplate(template, takes_parts, bool(ARGUMENT_TEXT.search(source)))


def _takes_parts(tree: nodes.Template) -> bool:
    """Return whether a loop of the template goes through a message's content."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        source: nodes.Node | None = loop.iter
        while isinstance(source, nodes.Filter):
            source = source.node
        match source:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name=name) if "content" in name.lower():
                return True
            case _:
                pass
    return False


def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions = cast("dict[str, Any]", environment.globals)
    functions["raise_exception"] = _raise_exception
    functions["strftime_now"] = _strftime_now
    return environment


def _generation_extension() -> type[Any]:
    """Return the extension that takes ``{% generation %}…{% endgeneration %}`` for its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own way

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(lineno)

    return Generation


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates use
    return datetime.now().strftime(format)
