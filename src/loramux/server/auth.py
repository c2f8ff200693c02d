"""Who may make which call: parameters of handlers that let a caller in or refuse it."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from loramux.server.context import Context
from loramux.server.errors import AdminRefused, InferenceRefused, Unauthorized
from loramux.server.keys import Caller, Keyring

logger = logging.getLogger(__name__)


async def _reader(request: Request, context: Context) -> Caller:
    """Raises Unauthorized."""
    if context.keyring.open_inference:
        return context.keyring.anyone
    return _identify(request, context.keyring)


async def _asker(request: Request, caller: Reader) -> Caller:
    """Holds one of the key's places until the response is over, however that comes about.

    Raises Unauthorized, InferenceRefused, or KeyLimitReached.
    """
    if caller.key is not None:
        request.state.facts.key = caller.key.name
        if not caller.key.infer:
            raise InferenceRefused(caller.key.name)
    caller.account.enter()
    request.state.at_end.callback(caller.account.leave)
    return caller


async def _admit_admin(request: Request, context: Context) -> None:
    """Raises Unauthorized or AdminRefused."""
    keyring = context.keyring
    if not keyring.keys:
        _require_local(request)
        return
    key = _identify(request, keyring).key
    assert key is not None
    if key.admin:
        logger.info("%s %s by the key %s", request.method, request.scope["route"].path, key.name)
        return
    remedy = "use an admin key"
    if not any(key.admin for key in keyring.keys):
        remedy = "the server has no admin key, give it one"
    raise AdminRefused(f"the key {key.name!r} may not load, change or unload adapters: {remedy}")


Reader = Annotated[Caller, Depends(_reader)]
"""Parameter of a handler that tells of models: whom it answers."""

Asker = Annotated[Caller, Depends(_asker)]
"""Parameter of a handler that asks a model: for whom."""

ADMIN_ONLY = Depends(_admit_admin)
"""Dependency of a route that changes what the server serves."""


def _identify(request: Request, keyring: Keyring) -> Caller:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("this call needs a key: send the header Authorization: Bearer KEY")
    # Headers are decoded from latin-1, so this gives back the bytes that were sent.
    caller = keyring.find(key.strip().encode("latin-1"))
    if caller is None:
        raise Unauthorized("this server does not know the key: check it, or ask the operator")
    return caller


def _require_local(request: Request) -> None:
    """Raises AdminRefused unless the call comes from this machine, and from no web page's script.

    A proxy on this machine makes every caller look local, so what it forwarded does not count.
    """
    forwarded = "forwarded" in request.headers or "x-forwarded-for" in request.headers
    if request.client is None or forwarded or not _is_loopback(request.client.host):
        raise AdminRefused(
            "adapters can be loaded and unloaded only from the server's own machine, or with an "
            "admin key where the server has been started with one"
        )
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
