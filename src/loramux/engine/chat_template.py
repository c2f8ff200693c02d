"""What a chat template knows of tools, read off its source without running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser


@dataclass(frozen=True, slots=True)
class ToolPlaces:
    """What a template does with tools and calls."""

    takes_tools: bool = False
    """It writes something for ``tools``; others leave them out without a word."""
    takes_calls: bool = False
    """It writes something for the ``tool_calls`` of messages."""
    text: str = ""
    """All literal text in it, a line for each piece."""


def read_tool_places(template: str) -> ToolPlaces:
    """What cannot be read uses nothing: rendering it fails, too."""
    try:
        tree = _ENVIRONMENT.parse(template)
        # Not any mention of the name: a macro may have a parameter that is called so.
        takes_tools = "tools" in find_undeclared_variables(tree)
    except (TemplateError, ValueError, RecursionError):
        return ToolPlaces()
    words = list(_literals(tree))
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    return ToolPlaces(
        takes_tools=takes_tools,
        takes_calls="tool_calls" in fields or "tool_calls" in words,
        text="\n".join(words),
    )


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, by which transformers marks the assistant's."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])


def _literals(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.TemplateData, nodes.Const)):
        if isinstance(node, nodes.TemplateData):
            yield node.data
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value
