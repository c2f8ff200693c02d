"""``POST /tokenize`` and ``POST /detokenize``: a model's own tokenizer, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from loramux.server.auth import Asker
from loramux.server.body import read_json
from loramux.server.context import Context
from loramux.server.messages import conversation
from loramux.server.openapi import request_body
from loramux.server.schema import DetokenizeRequest, TokenizeRequest
from loramux.server.tokens import decode, encode, render_chat
from loramux.server.tools.use import for_template

router = APIRouter()


@router.post("/tokenize", openapi_extra=request_body(TokenizeRequest))
async def tokenize(request: Request, context: Context, caller: Asker) -> dict[str, Any]:
    """The tokens that a completion of the prompt, or a chat of the messages, would begin with."""
    body = await read_json(request, TokenizeRequest, limit=context.options.max_body_bytes)
    codec = await context.codec_of(body.model, caller)
    if body.messages is None:
        assert body.prompt is not None, "the schema asks for one of them"
        tokens = await encode(codec, body.prompt)
    else:
        tools = for_template(body.tools or [])
        tokens = await render_chat(codec, conversation(body.messages), tools)
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": context.engine.max_model_len,
        "token_strs": (
            [codec.decode([token], skip_special_tokens=False) for token in tokens]
            if body.return_token_strs
            else None
        ),
    }


@router.post("/detokenize", openapi_extra=request_body(DetokenizeRequest))
async def detokenize(request: Request, context: Context, caller: Asker) -> dict[str, Any]:
    """The text of tokens, special ones included."""
    body = await read_json(request, DetokenizeRequest, limit=context.options.max_body_bytes)
    codec = await context.codec_of(body.model, caller)
    return {"prompt": await decode(codec, body.tokens)}
