"""The turns of a conversation: what they may hold, and how a chat template has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import from_json

from loramux.errors import InvalidRequest
from loramux.server.strict import NoOps, Strict
from loramux.server.tools.schema import ToolCall


class TextPart(Strict):
    """A part of a message; other kinds than text are not supported."""

    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(Strict):
    """One turn. The fields that are let through empty are those that clients copy from answers."""

    no_op: ClassVar[NoOps] = {
        "name": (None,),
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "function_call": (None,),
        "tool_calls": (None, []),
        "reasoning_content": (None,),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None,
        BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    """Only an assistant's message with calls may be without."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    """The call that a tool's message answers."""


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises InvalidRequest, which names the message.

    Text parts are joined by line breaks, ``developer`` is OpenAI's newer word for system, and the
    arguments of calls are objects.
    """
    return [_for_template(message, f"messages.{i}") for i, message in enumerate(messages)]


def _for_template(message: ChatMessage, place: str) -> dict[str, Any]:
    _check(message, place)
    written: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.content is not None:
        written["content"] = "\n".join(part.text for part in message.content)
    if message.tool_calls:
        written["tool_calls"] = [
            _call_for_template(call, f"{place}.tool_calls.{i}")
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    return written


def _check(message: ChatMessage, place: str) -> None:
    """Raise InvalidRequest for fields that do not go with the message's role."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(
            f"{place}.tool_calls: only messages of the assistant have calls, leave them out",
            f"{place}.tool_calls",
        )
    if (message.tool_call_id is not None) != (message.role == "tool"):
        wrong = "is missing" if message.role == "tool" else "is for messages of tools: leave it out"
        raise InvalidRequest(f"{place}.tool_call_id {wrong}", f"{place}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise InvalidRequest(f"{place}.content is missing", f"{place}.content")


def _call_for_template(call: ToolCall, place: str) -> dict[str, Any]:
    field = f"{place}.function.arguments"
    try:
        arguments = from_json(call.function.arguments, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field) from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field} must be a JSON object, as text", field)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
