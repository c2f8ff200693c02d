"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loramux.engine.interface import TextCodec
from loramux.errors import InvalidRequest
from loramux.server import logprobs
from loramux.server.answer import Part, Usage
from loramux.server.auth import Asker
from loramux.server.body import read_json
from loramux.server.context import Context
from loramux.server.openapi import STREAMED, request_body
from loramux.server.reply import reply
from loramux.server.schema import ChatRequest
from loramux.server.tokens import render_chat

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=request_body(ChatRequest), responses=STREAMED)
async def create_chat_completion(request: Request, context: Context, caller: Asker) -> Response:
    """Answer a conversation; see ``ChatRequest`` for the fields."""
    body = await read_json(request, ChatRequest, limit=context.options.max_body_bytes)
    params = body.params()
    codec = await context.codec_of(body.model, caller)
    prompt = await render_chat(codec, [message.for_template() for message in body.messages])
    renderer = ChatRenderer(body, prompt, codec, answer_id=f"chatcmpl-{request.state.id}")
    try:
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
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        # The engine's word for what this endpoint calls messages.
        raise InvalidRequest(str(error), "messages") from error


class ChatRenderer:
    """Chat completions: whole messages, or chunks that begin with the role."""

    def __init__(
        self, body: ChatRequest, prompt: list[int], codec: TextCodec, *, answer_id: str
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._codec = codec
        self._head = {"id": answer_id, "created": int(time.time()), "model": body.model}

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        chunks = [self._opening(part)] if part.first else []
        choice = self._choice(part) | {"delta": {"content": part.text} if part.text else {}}
        if part.text or part.logprobs or part.finish_reason or self._body.return_token_ids:
            chunks.append(self._chunk([choice], None))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        rendered = [
            self._choice(choice)
            | {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            for choice in choices
        ]
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

    def _choice(self, part: Part) -> dict[str, Any]:
        """What a whole choice and a chunk's choice have in common."""
        choice = {
            "index": part.index,
            "logprobs": logprobs.chat(self._codec, part.logprobs) if part.logprobs else None,
            "finish_reason": part.finish_reason,
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
