"""Adapters over HTTP: as a collection with REST's verbs, and by vLLM's two calls."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from loramux.errors import AdapterExists, UnknownAdapter
from loramux.server.auth import ADMIN_ONLY, Reader
from loramux.server.body import read_json
from loramux.server.context import Context, ServerContext
from loramux.server.openapi import request_body
from loramux.server.schema import (
    AddAdapterRequest,
    ChangeAdapterRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from loramux.types import AdapterInfo, SourceRules

router = APIRouter()


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    dependencies=[ADMIN_ONLY],
    openapi_extra=request_body(LoadAdapterRequest),
)
async def load_adapter(request: Request, context: Context) -> Response:
    """Load an adapter under a name. An adapter that cannot be served exactly is refused."""
    body = await read_json(request, LoadAdapterRequest, limit=context.options.max_body_bytes)
    body = AddAdapterRequest(
        name=body.lora_name,
        source=body.lora_path,
        load_inplace=body.load_inplace,
        pinned=body.pinned,
    )
    await _load(context, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    dependencies=[ADMIN_ONLY],
    openapi_extra=request_body(UnloadAdapterRequest),
)
async def unload_adapter(request: Request, context: Context) -> Response:
    """Take no new requests for an adapter; running ones finish."""
    body = await read_json(request, UnloadAdapterRequest, limit=context.options.max_body_bytes)
    await _unload(context, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapters")
async def list_adapters(context: Context, caller: Reader) -> dict[str, Any]:
    """All that is known of each adapter that the caller may know of."""
    return {"object": "list", "data": [asdict(info) for info in await context.adapters(caller)]}


@router.post(
    "/v1/adapters",
    status_code=201,
    dependencies=[ADMIN_ONLY],
    openapi_extra=request_body(AddAdapterRequest),
)
async def add_adapter(request: Request, context: Context) -> dict[str, Any]:
    """Load an adapter under a name. An adapter that cannot be served exactly is refused."""
    body = await read_json(request, AddAdapterRequest, limit=context.options.max_body_bytes)
    return asdict(await _load(context, body))


@router.get("/v1/adapters/{name:path}")
async def get_adapter(name: str, context: Context, caller: Reader) -> dict[str, Any]:
    """All that is known of one adapter; names may hold slashes."""
    for info in await context.adapters(caller):
        if info.name == name:
            return asdict(info)
    raise UnknownAdapter(name)


@router.patch(
    "/v1/adapters/{name:path}",
    dependencies=[ADMIN_ONLY],
    openapi_extra=request_body(ChangeAdapterRequest),
)
async def change_adapter(name: str, request: Request, context: Context) -> dict[str, Any]:
    """Pin or unpin. A pin that would leave no slot for others is refused."""
    body = await read_json(request, ChangeAdapterRequest, limit=context.options.max_body_bytes)
    return asdict(await context.engine.pin_adapter(name, pinned=body.pinned))


@router.delete("/v1/adapters/{name:path}", dependencies=[ADMIN_ONLY])
async def delete_adapter(name: str, context: Context) -> dict[str, Any]:
    """Take no new requests for an adapter; running ones finish."""
    await _unload(context, name)
    return {"name": name, "deleted": True}


async def _load(context: ServerContext, body: AddAdapterRequest) -> AdapterInfo:
    if body.name == context.base_name:
        raise AdapterExists(body.name, "the base model has this name: take another")
    return await context.engine.load_adapter(
        body.name,
        body.source,
        load_inplace=body.load_inplace,
        pinned=body.pinned,
        rules=SourceRules(context.options.adapter_root, context.options.adapter_sources),
    )


async def _unload(context: ServerContext, name: str) -> None:
    await context.engine.unload_adapter(name)
    context.metrics.forget_adapter(name)
