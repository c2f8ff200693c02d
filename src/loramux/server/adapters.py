"""Adapters over HTTP: load, unload and list."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from loramux.errors import AdapterExists
from loramux.server.body import read_json
from loramux.server.context import Context
from loramux.server.errors import AdminRefused
from loramux.server.openapi import request_body
from loramux.server.schema import LoadAdapterRequest, UnloadAdapterRequest
from loramux.types import SourceRules

router = APIRouter()


@router.post("/v1/load_lora_adapter", openapi_extra=request_body(LoadAdapterRequest))
async def load_adapter(request: Request, context: Context) -> Response:
    """Load an adapter under a name. An adapter that cannot be served exactly is refused."""
    require_local(request)
    body = await read_json(request, LoadAdapterRequest, limit=context.options.max_body_bytes)
    if body.lora_name == context.base_name:
        raise AdapterExists(body.lora_name, "the base model has this name: take another")
    await context.engine.load_adapter(
        body.lora_name,
        body.lora_path,
        load_inplace=body.load_inplace,
        pinned=body.pinned,
        rules=SourceRules(context.options.adapter_root, context.options.adapter_sources),
    )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=request_body(UnloadAdapterRequest))
async def unload_adapter(request: Request, context: Context) -> Response:
    """Take no new requests for an adapter; running ones finish."""
    require_local(request)
    body = await read_json(request, UnloadAdapterRequest, limit=context.options.max_body_bytes)
    await context.engine.unload_adapter(body.lora_name)
    context.metrics.forget_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapters")
async def list_adapters(context: Context) -> dict[str, Any]:
    """All that is known of each adapter."""
    return {"object": "list", "data": [asdict(info) for info in context.engine.adapters()]}


def require_local(request: Request) -> None:
    """Raises AdminRefused unless the call comes from this machine, and from no web page's script.

    A proxy on this machine makes every caller look local, so what it forwarded does not count.
    """
    forwarded = "forwarded" in request.headers or "x-forwarded-for" in request.headers
    if request.client is None or forwarded or not _is_loopback(request.client.host):
        raise AdminRefused("adapters can be loaded and unloaded only from the server's own machine")
    origin = request.headers.get("origin")
    if origin is not None and not _is_loopback(urlsplit(origin).hostname or ""):
        raise AdminRefused(f"pages of {origin} may not load or unload adapters")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
