"""Describes request bodies in ``/openapi.json``; handlers read them without the framework."""

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
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

_REF = "#/components/schemas/{model}"
_BODIES = (
    CompletionRequest,
    ChatRequest,
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


def install(app: FastAPI) -> None:
    """Add the schemas that ``request_body`` refers to."""
    framework = app.openapi

    def openapi() -> dict[str, Any]:
        document = framework()
        _, schemas = models_json_schema(
            [(model, "validation") for model in _BODIES], ref_template=_REF
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components.update(schemas["$defs"])
        return document

    app.openapi = openapi
