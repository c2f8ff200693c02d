"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loramux.engine.interface import TextCodec
from loramux.server import logprobs
from loramux.server.answer import Part, Usage
from loramux.server.auth import Asker
from loramux.server.body import read_json
from loramux.server.context import Context
from loramux.server.errors import prompt_called
from loramux.server.messages import conversation
from loramux.server.openapi import STREAMED, request_body
from loramux.server.reply import reply
from loramux.server.schema import ChatRequest
from loramux.server.tokens import render_chat
from loramux.server.tools.message import Message
from loramux.server.tools.use import ToolUse, for_template, offered_tools, plan_use

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatRequest), responses=STREAMED)
async def create_chat_completion(request: Request, context: Context, caller: Asker) -> Response:
    """Answer a conversation; see ``ChatRequest`` for the fields."""
    body = await read_json(request, ChatRequest, limit=context.options.max_body_bytes)
    request.state.facts.note_body(body)
    params, tools = body.params(), offered_tools(body)
    messages = conversation(body.messages)
    codec = await context.codec_of(body.model, caller)
    prompt = await render_chat(codec, messages, for_template(tools))
    use = plan_use(body, tools, codec, context.options.tool_parser)
    params = use.params(params)
    renderer = ChatRenderer(body, prompt, codec, use, answer_id=f"chatcmpl-{request.state.id}")
    with prompt_called("messages"):
        return await reply(
            request,
            context,
            body,
            codec,
            caller=caller,
            prompts=[prompt],
            params=params,
            renderer=renderer,
        )


class ChatRenderer:
    """Chat completions: whole messages, or chunks that begin with the role."""

    def __init__(
        self,
        body: ChatRequest,
        prompt: list[int],
        codec: TextCodec,
        use: ToolUse,
        *,
        answer_id: str,
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._codec = codec
        self._use = use
        self._messages: dict[int, Message] = {}
        """Of the choices of a stream, by index."""
        self._head = {"id": answer_id, "created": int(time.time()), "model": body.model}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        chunks = []
        if part.first:
            self._messages[part.index] = Message(self._use)
            chunks.append(self._opening(part))
        message = self._messages[part.index]
        deltas = message.deltas(part.text, last=part.finish_reason is not None)
        if not deltas and (part.logprobs or part.finish_reason or self._body.return_token_ids):
            deltas.append({})
        for delta in deltas:
            # What is told of the tokens, and of the end, comes once, with the last delta.
            told = part if delta is deltas[-1] else Part(part.index, part.prompt, first=False)
            choice = self._choice(told, message) | {"delta": delta}
            chunks.append(self._chunk([choice], None))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        rendered = []
        for choice in choices:
            message = Message(self._use)
            written = message.whole(choice.text)
            rendered.append(self._choice(choice, message) | {"message": written})
        return {
            **self._head,
            "object": "chat.completion",
            "choices": rendered,
            "usage": usage.as_json(),
            **self._prompt_fields(choices[0]),
        }

    def _opening(self, part: Part) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], None) | self._prompt_fields(part)

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._body.include_usage:
            chunk["usage"] = usage and usage.as_json()
        return chunk

    def _choice(self, part: Part, message: Message) -> dict[str, Any]:
        """What a whole choice and a chunk's choice have in common."""
        choice = {
            "index": part.index,
            "logprobs": logprobs.chat(self._codec, part.logprobs) if part.logprobs else None,
            "finish_reason": message.finish_reason(part.finish_reason),
            "stop_reason": part.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _prompt_fields(self, part: Part) -> dict[str, Any]:
        """What was asked about the prompt; it stands beside the choices, as in vLLM."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None and part.prompt_logprobs is not None:
            fields["prompt_logprobs"] = logprobs.prompt(self._codec, part.prompt_logprobs)
        return fields
