"""What chat templates know of tools, as their source tells."""

from __future__ import annotations

import pytest

from loramux.engine.chat_template import ToolPlaces, read_tool_places


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{{ tools }}", True),
        ("{% for m in messages %}{% if m and tools %}{{ tools }}{% endif %}{% endfor %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}", True),
        ("{% if mine is defined %}{% set tools = mine %}{% endif %}{{ tools }}", True),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}{{ show(tools) }}", True),
        ("{% macro show(tools) %}{{ tools }}{% endmacro %}{{ show(3) }}", False),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{% set tools = 1 %}{{ tools }}", False),
        ("{# tools #}tools {{ 'tools' }} {{ messages[0].tools }}", False),
        ("{% generation %}{{ tools }}{% endgeneration %}{% continue %}", True),
        ("{% for m in messages %}{% break %}{% endfor %}", False),
        ("{{ tools", False),
        ("{{ tools }}{{ " + "9" * 5000 + " }}", False),
        ("{{ " + "(" * 5000 + "tools" + ")" * 5000 + " }}", False),
    ],
)  # fmt: skip
def test_a_template_takes_tools_if_it_looks_at_the_variable(template: str, takes: bool) -> None:
    assert read_tool_places(template).takes_tools == takes


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{{ messages[0].tool_calls }}", True),
        ("{{ messages[0]['tool_calls'] }}", True),
        ("{% if 'tool_calls' in messages[0] %}{% endif %}", True),
        ("{{ tool_calls }} tool_calls", False),
    ],
)
def test_a_template_takes_calls_if_it_looks_at_the_field(template: str, takes: bool) -> None:
    assert read_tool_places(template).takes_calls == takes


def test_the_text_of_a_template_is_unescaped_and_without_names() -> None:
    template = """<a>{{ '\\n{"name": ' + name }}{# "comment" #}{% if x == "y" %}[B]{% endif %}"""
    places = read_tool_places(template)
    assert sorted(places.text.split("\n")) == sorted(["<a>", "", '{"name": ', "y", "[B]"])


def test_a_template_that_cannot_be_read_has_no_places() -> None:
    assert read_tool_places("{% nonsense %}") == ToolPlaces()
