"""The message of one choice: what the parser finds in its text, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any

from loramux.server.tools.reader import Arguments, CallStart, Event
from loramux.server.tools.use import ToolUse
from loramux.types import FinishReason


class Message:
    """Grows with its text, in a stream, or is made of all of it at once."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = use.new_parser()
        self._has_calls = False

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """What ``text`` adds, as deltas of a stream in their order."""
        return [self._delta(event) for event in self._events(text, last=last)]

    def whole(self, text: str) -> dict[str, Any]:
        """The message that ``text`` is."""
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        for event in self._events(text, last=True):
            if isinstance(event, str):
                content.append(event)
            elif isinstance(event, CallStart):
                calls.append(self._call(event))
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message = {"role": "assistant", "content": "".join(content), "refusal": None}
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Why the choice has ended, in OpenAI's words."""
        calls = self._has_calls and self._use.by_choice
        return "tool_calls" if calls and reason == "stop" else reason

    def _events(self, text: str, *, last: bool) -> list[Event]:
        events = self._parser.push(text)
        if last:
            events += self._parser.finish()
        self._has_calls |= any(isinstance(event, CallStart) for event in events)
        return events

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, str):
            return {"content": event}
        if isinstance(event, Arguments):
            call = {"function": {"arguments": event.text}}
        else:
            call = self._call(event)
        return {"tool_calls": [{"index": event.index, **call}]}

    def _call(self, start: CallStart) -> dict[str, Any]:
        function = {"name": start.name, "arguments": ""}
        return {"id": self._use.new_id(), "type": "function", "function": function}
