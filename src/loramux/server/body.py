"""Reads a request's body into its schema, and no more of it than is allowed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from loramux.errors import RequestTooLarge
from loramux.server.errors import BodyTooSlow, UnsupportedMediaType, invalid_body

M = TypeVar("M", bound=BaseModel)

_BODY_SECONDS = 60.0


async def read_json(request: Request, model: type[M], *, limit: int) -> M:
    """Raises UnsupportedMediaType, RequestTooLarge past ``limit`` bytes, or InvalidRequest."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Not only strictness: a web page cannot send this type to another origin unasked.
        raise UnsupportedMediaType("send the body as JSON with Content-Type: application/json")
    try:
        return model.model_validate_json(await _read(request, limit))
    except ValidationError as error:
        raise invalid_body(error) from None


async def _read(request: Request, limit: int) -> bytes:
    too_large = RequestTooLarge(
        f"the body is larger than {limit} bytes: shorten it or start the server with a larger "
        "--max-body-bytes"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            # Counted as it comes in: a chunked body declares no length.
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise BodyTooSlow(f"the body has not come within {_BODY_SECONDS:g} seconds") from None
    return bytes(body)
