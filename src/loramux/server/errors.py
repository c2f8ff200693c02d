"""Every error leaves the server in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from loramux.errors import (
    AdapterExists,
    AdapterRefused,
    AdapterReplaced,
    AdapterSourceForbidden,
    AdapterSourceNotFound,
    AdapterSourceUnavailable,
    EngineStopped,
    InvalidRequest,
    KeyLimitReached,
    LoramuxError,
    RegistryUnusable,
    RequestError,
    RequestTooLarge,
    TooManyRequests,
    UnknownAdapter,
    UnknownModel,
)

logger = logging.getLogger(__name__)


class GenerationFailed(LoramuxError):
    """The engine could not finish an answer that it had begun."""


class DeadlineExceeded(LoramuxError):
    """An answer was not complete in time."""

    http_status = 504


class BodyTooSlow(RequestError):
    """The body did not come in time."""

    http_status = 408


class Unauthorized(RequestError):
    """The call needs a key and has none, or one that is not known."""

    http_status = 401


class InferenceRefused(RequestError):
    """The key may administer the server and nothing else."""

    http_status = 403

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the admin key {key!r} may not send requests to models: use an inference key, or give "
            "it infer = true in the server's keys file"
        )


class PriorityRefused(InvalidRequest):
    """The key may not send a request of this priority."""

    http_status = 403

    def __init__(self, key: str, priority: int, least: int | None) -> None:
        remedy = "leave it out" if least is None else f"send {least} or a higher number"
        super().__init__(
            f"the key {key!r} may not send requests of priority {priority}: {remedy}, or ask the "
            "operator for another min_priority in the server's keys file",
            "priority",
        )


class AdminRefused(RequestError):
    """The caller may not change the server."""

    http_status = 403


class UnsupportedMediaType(RequestError):
    """The body is not declared as JSON."""

    http_status = 415


_CODES: dict[type[LoramuxError], str] = {
    UnknownModel: "model_not_found",
    AdapterReplaced: "adapter_replaced",
    RequestTooLarge: "request_too_large",
    KeyLimitReached: "rate_limit_exceeded",
    Unauthorized: "invalid_api_key",
    AdapterRefused: "adapter_refused",
    AdapterSourceNotFound: "adapter_source_not_found",
    AdapterSourceForbidden: "adapter_source_forbidden",
    AdapterSourceUnavailable: "adapter_source_unavailable",
    RegistryUnusable: "registry_unusable",
    UnknownAdapter: "adapter_not_found",
    AdapterExists: "adapter_exists",
    DeadlineExceeded: "deadline_exceeded",
    BodyTooSlow: "body_too_slow",
}
_RETRY_SECONDS = "1"
"""When there will be room, or another server, nobody knows."""
_TYPES = {403: "permission_error", 429: "rate_limit_error"}


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """``{"error": {...}}`` with the four keys of OpenAI."""
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, fallback)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@contextmanager
def prompt_called(name: str) -> Iterator[None]:
    """What the engine says of a prompt is told of the field ``name``."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        raise InvalidRequest(str(error), name) from error


def describe(error: LoramuxError) -> dict[str, Any]:
    """The error object of a typed error."""
    param = "model" if isinstance(error, UnknownModel) else None
    if isinstance(error, InvalidRequest):
        param = error.param
    return error_object(error.http_status, str(error), param=param, code=_CODES.get(type(error)))


def invalid_body(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong with a body, as one sentence that names the field."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {message}")
    if param is None:
        return InvalidRequest(f"the body must be a JSON object: {message}")
    if kind == "extra_forbidden":
        return InvalidRequest(f"{param} is not supported: leave it out", param)
    if kind == "missing":
        return InvalidRequest(f"{param} is missing", param)
    return InvalidRequest(f"{param}: {message}", param)


def internal_error() -> JSONResponse:
    """The answer to a fault of our own; its cause is in the log."""
    return JSONResponse(error_object(500, "internal error: see the server's log"), 500)


def _headers(error: LoramuxError) -> dict[str, str]:
    if isinstance(error, RequestTooLarge | BodyTooSlow):
        return {"Connection": "close"}  # the rest of the body is not read
    if isinstance(error, DeadlineExceeded):
        return {"X-Should-Retry": "false"}  # OpenAI's clients would do all the work again
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, KeyLimitReached):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, TooManyRequests | EngineStopped):
        return {"Retry-After": _RETRY_SECONDS}
    return {}


def install(app: FastAPI) -> None:
    """Handle typed errors and what the framework raises by itself (unknown route or method)."""

    @app.exception_handler(LoramuxError)
    def _typed(request: Request, error: LoramuxError) -> JSONResponse:
        request.state.facts.note_error(error)
        return JSONResponse(describe(error), error.http_status, headers=_headers(error))

    @app.exception_handler(HTTPException)
    def _framework(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(
            error_object(error.status_code, message), error.status_code, headers=error.headers
        )
