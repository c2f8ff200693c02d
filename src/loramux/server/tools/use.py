"""How one request uses its tools: what the model is told and held to, and how it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loramux.engine.interface import TextCodec
from loramux.errors import InvalidRequest
from loramux.guide import Guide
from loramux.server.schema import ChatRequest
from loramux.server.tools.forced import list_guide, named_guide, read_list
from loramux.server.tools.grammar import strict_guide
from loramux.server.tools.parser import CallParser, OneCall, Parser, PlainText
from loramux.server.tools.reader import Reader, Reading
from loramux.server.tools.schema import FunctionDefinition, NamedChoice, Tool
from loramux.server.tools.style import long_id
from loramux.server.tools.styles import STYLES, find_style
from loramux.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the tools of a request come to. The default is that of a request without any."""

    guide: Guide | None = None
    kept: tuple[str, ...] = ()
    """Special tokens that the parser must see."""
    new_parser: Callable[[], Parser] = PlainText
    """A fresh one for each choice."""
    new_id: Callable[[], str] = long_id
    by_choice: bool = True
    """The model has chosen what to call, which is a reason to finish; a named function is none."""

    def params(self, params: SamplingParams) -> SamplingParams:
        """The request's parameters with what tools ask for. Raises InvalidRequest."""
        if self.guide is None and not self.kept:
            return params
        return replace(params, guide=self.guide, kept_special_tokens=self.kept)


def offered_tools(body: ChatRequest) -> list[Tool]:
    """The tools that the model is told of. Raises InvalidRequest for fields that contradict them.

    With ``tool_choice`` none those are none.
    """
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if not tools and choice not in (None, "none"):
        raise InvalidRequest("tool_choice needs tools: send some or leave it out", "tool_choice")
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise InvalidRequest(f"tools has {times} functions called {name!r}: rename them", "tools")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice names the function {choice.function.name!r}, which is not among the "
            "tools: add it or name another one",
            "tool_choice",
        )
    if not tools or choice == "none":
        return []
    guides = list(body.guides())
    if guides:
        raise InvalidRequest(
            f"{guides[0]} and tools exclude each other: leave one out, or send tool_choice none",
            guides[0],
        )
    return tools


def for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates take them, which read the schema of what takes no arguments, too."""
    return [{"type": "function", "function": _function_for_template(t.function)} for t in tools]


def plan_use(
    body: ChatRequest, tools: Sequence[Tool], codec: TextCodec, tool_parser: str
) -> ToolUse:
    """How the offered ``tools`` are used; ``tool_parser`` is the server's option.

    Raises InvalidRequest for schemas that no guide can have, and where calls are the model's choice
    and nobody knows how it writes them.
    """
    if not tools:
        return ToolUse()
    functions = [tool.function for tool in tools]
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    style = STYLES.get(tool_parser) or find_style(codec.tool_template)
    new_id = long_id if style is None else style.new_id
    if isinstance(choice, NamedChoice):
        [function] = [f for f in functions if f.name == choice.function.name]
        return ToolUse(
            guide=named_guide(function),
            new_parser=lambda: OneCall(function.name),
            new_id=new_id,
            by_choice=False,
        )
    if choice == "required":
        new_parser = _parser_of(functions, read_list, parallel=parallel)
        guide = list_guide(functions, parallel=parallel)
        return ToolUse(guide=guide, new_parser=new_parser, new_id=new_id)
    if style is None:
        raise InvalidRequest(
            "the model's chat template does not say in a known style how it calls tools: start the "
            f"server with --tool-parser ({', '.join(STYLES)}), or send tool_choice required",
            "tools",
        )
    shows_special = body.skip_special_tokens is False
    kept = () if shows_special else tuple(m for m in style.markers if m in codec.special_tokens)
    guide = None
    if any(function.strict for function in functions):
        guide = strict_guide(style, functions, codec.added_tokens, parallel=parallel)
    new_parser = _parser_of(functions, style.read, parallel=parallel, hidden=kept)
    return ToolUse(guide=guide, kept=kept, new_parser=new_parser, new_id=new_id)


def _function_for_template(function: FunctionDefinition) -> dict[str, Any]:
    written: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        written["description"] = function.description
    parameters = function.parameters
    written["parameters"] = (
        {"type": "object", "properties": {}} if parameters is None else parameters
    )
    return written


def _parser_of(
    functions: Sequence[FunctionDefinition],
    read: Callable[[Reader], Reading[None]],
    *,
    parallel: bool,
    hidden: Sequence[str] = (),
) -> Callable[[], Parser]:
    names = frozenset(function.name for function in functions)
    max_calls = None if parallel else 1
    return lambda: CallParser(Reader(names, max_calls=max_calls, hidden=hidden), read)
