"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections import defaultdict
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
from loramux.server.openapi import STREAMED, request_body
from loramux.server.reply import reply
from loramux.server.schema import CompletionRequest, Prompt
from loramux.server.tokens import encode_all

router = APIRouter()


@router.post("/v1/completions", openapi_extra=request_body(CompletionRequest), responses=STREAMED)
async def create_completion(request: Request, context: Context, caller: Asker) -> Response:
    """Continue each prompt; see ``CompletionRequest`` for the fields."""
    body = await read_json(request, CompletionRequest, limit=context.options.max_body_bytes)
    request.state.facts.note_body(body)
    params = body.params()
    codec = await context.codec_of(body.model, caller)
    prompts = await encode_all(codec, body.prompt)
    renderer = CompletionRenderer(body, prompts, codec, answer_id=f"cmpl-{request.state.id}")
    return await reply(
        request,
        context,
        body,
        codec,
        caller=caller,
        prompts=prompts,
        params=params,
        renderer=renderer,
    )


class CompletionRenderer:
    """Text completions: a chunk's choice and a whole choice have the same shape."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[list[int]],
        codec: TextCodec,
        *,
        answer_id: str,
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._codec = codec
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of each choice's tokens so far, for ``text_offset``."""

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        choice = self._choice(part)
        if choice["text"] or part.logprobs or part.finish_reason or self._body.return_token_ids:
            return [self._chunk([choice], None)]
        return []

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        rendered = [self._choice(choice) for choice in choices]
        return {**self._head, "choices": rendered, "usage": usage.as_json()}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._body.include_usage:
            chunk["usage"] = usage and usage.as_json()
        return chunk

    def _choice(self, part: Part) -> dict[str, Any]:
        echo = bool(self._body.echo and part.first)
        choice = {
            "index": part.index,
            "text": (self._prompt_text(part.prompt) if echo else "") + part.text,
            "logprobs": self._logprobs(part, echo=echo),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self._body.prompt_logprobs is not None and part.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt(self._codec, part.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids
            choice["prompt_token_ids"] = self._prompts[part.prompt] if part.first else None
        return choice

    def _logprobs(self, part: Part, *, echo: bool) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        entries = list(part.logprobs)
        token_ids = list(part.token_ids)
        if echo:
            entries = [*(part.prompt_logprobs or ()), *entries]
            token_ids = self._prompts[part.prompt] + token_ids
        shape, end = logprobs.legacy(self._codec, entries, token_ids, self._offsets[part.index])
        self._offsets[part.index] = end
        return shape

    def _prompt_text(self, number: int) -> str:
        given: Prompt = self._body.prompt[number]
        return given if isinstance(given, str) else self._codec.decode(given)
