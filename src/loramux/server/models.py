"""``GET /v1/models``: every name that the caller's requests may use."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from loramux.errors import UnknownModel
from loramux.server.auth import Reader
from loramux.server.context import Context, ServerContext
from loramux.server.keys import Caller

router = APIRouter()


@router.get("/v1/models")
async def list_models(context: Context, caller: Reader) -> dict[str, Any]:
    """The base model first, then the adapters with the base as their parent."""
    return {"object": "list", "data": await _models(context, caller)}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, context: Context, caller: Reader) -> dict[str, Any]:
    """One of them; names may hold slashes."""
    for model in await _models(context, caller):
        if model["id"] == name:
            return model
    raise UnknownModel(name)


async def _models(context: ServerContext, caller: Caller) -> list[dict[str, Any]]:
    base = context.base_name
    models = [
        _model(context, info.name, root=info.source, parent=base)
        for info in await context.adapters(caller)
    ]
    if caller.may_see(base):
        models.insert(0, _model(context, base, root=context.engine.base_name, parent=None))
    return models


def _model(context: ServerContext, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "loramux",
        "root": root,
        "parent": parent,
        "max_model_len": context.engine.max_model_len,
    }
