"""What requests may say of tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from loramux.server.strict import Strict

FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise ValueError("must be the schema of an object, since arguments are named")
    return schema


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    """A JSON schema of an object; without one the function takes none."""
    strict: bool | None = None
    """Arguments keep to the schema, also in calls that the model makes by itself."""


class Tool(Strict):
    """A tool; functions are the one kind."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The name of a function among the tools."""

    name: FunctionName


class NamedChoice(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _kind_of_choice(value: object) -> str:
    return "word" if isinstance(value, str) else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedChoice, Tag("function")],
    Discriminator(_kind_of_choice),
]


class CalledFunction(Strict):
    """What a call was for."""

    name: FunctionName
    arguments: str
    """A JSON object, as text."""


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction
