"""What the framework cannot see, for ``/openapi.json``: bodies, errors, streams and keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from loramux.server.schema import (
    AddAdapterRequest,
    ChangeAdapterRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

_REF = "#/components/schemas/{model}"
_BODIES = (
    CompletionRequest,
    ChatRequest,
    EmbeddingsRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AddAdapterRequest,
    ChangeAdapterRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """A route's ``openapi_extra``: its body has the schema of ``model``."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream: true` its parts as events, `[DONE]` the last",
        "content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}},
    }
}
"""A route's ``responses`` that may be sent as a stream."""

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def install(app: FastAPI) -> None:
    """Add the schemas that ``request_body`` refers to, the shape of errors, and keys."""
    framework = app.openapi

    def openapi() -> dict[str, Any]:
        document = framework()
        _, schemas = models_json_schema(
            [(model, "validation") for model in _BODIES], ref_template=_REF
        )
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(schemas["$defs"] | {"Error": _ERROR})
        # A server without keys asks for none, hence the empty one.
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # the framework's own, never sent
                operation["responses"]["default"] = {
                    "description": "An error, in OpenAI's shape",
                    "content": {
                        "application/json": {"schema": {"$ref": _REF.format(model="Error")}}
                    },
                }
        return document

    app.openapi = openapi
