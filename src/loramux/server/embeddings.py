"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from loramux.server.answer import Part
from loramux.server.auth import Asker
from loramux.server.body import read_json
from loramux.server.context import Context
from loramux.server.errors import prompt_called
from loramux.server.openapi import request_body
from loramux.server.reply import UNSEEN_INTERVAL, submit
from loramux.server.schema import EmbeddingsRequest
from loramux.server.sse import until_disconnect
from loramux.server.tokens import encode_all
from loramux.types import EmbeddingRequest, numbers_of

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=request_body(EmbeddingsRequest))
async def create_embeddings(request: Request, context: Context, caller: Asker) -> Response:
    """Make a vector of each input; see ``EmbeddingsRequest`` for the fields."""
    body = await read_json(request, EmbeddingsRequest, limit=context.options.max_body_bytes)
    request.state.facts.note_body(body)
    params = body.params()
    codec = await context.codec_of(body.model, caller)
    prompts = await encode_all(codec, body.input)
    with prompt_called("input"):
        answer = await submit(
            context,
            [
                EmbeddingRequest(prompt_token_ids=tokens, params=params, codec=codec.key)
                for tokens in prompts
            ],
            body,
            caller=caller,
            facts=request.state.facts,
            endpoint=request.url.path,
            interval=UNSEEN_INTERVAL,
        )
    with answer:
        parts = await until_disconnect(request.receive, answer.collect())
    as_text = body.encoding_format == "base64"
    # Thousands of numbers for each input: to write them takes longer than others should wait.
    content = await asyncio.to_thread(
        _content, body.model, parts, answer.usage.prompt_tokens, as_text=as_text
    )
    return Response(content, media_type="application/json")


def _content(model: str, parts: Sequence[Part], num_tokens: int, *, as_text: bool) -> str:
    """The answer's JSON, made in pieces: while one is made no other thread runs."""
    data = ",".join(
        json.dumps(
            {
                "object": "embedding",
                "index": part.index,
                "embedding": _written(part, as_text=as_text),
            }
        )
        for part in parts
    )
    usage = json.dumps({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
    return f'{{"object":"list","model":{json.dumps(model)},"data":[{data}],"usage":{usage}}}'


def _written(part: Part, *, as_text: bool) -> str | list[float]:
    """A vector as the client wants it."""
    assert part.embedding is not None, "an embedding that has ended well has a vector"
    if as_text:
        return base64.b64encode(part.embedding).decode()
    return numbers_of(part.embedding)
