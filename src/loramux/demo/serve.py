"""``loramux demo --serve``: the demo's engine goes on behind HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import socket
from collections.abc import Sequence

from loramux.config import ServerOptions
from loramux.engine.interface import Engine
from loramux.errors import ConfigError


def listen(options: ServerOptions) -> socket.socket:
    """A socket that takes connections at once; they are answered once the engine is there.

    Raises ConfigError when the port cannot be had.
    """
    try:
        return socket.create_server((options.host, options.port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port} ({error.strerror}): "
            "choose another port with --port, or 0 for a free one"
        ) from error


def curl_examples(listener: socket.socket, models: Sequence[str], prompt: str) -> str:
    """Shell lines that list the models and ask the base and the last adapter, ready to paste."""
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}/v1"
    lines = [f"serving at {url}, stop with Ctrl-C; try:", f"  curl {url}/models"]
    for model in (models[0], models[-1]):
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 40}
        lines.append(
            f"  curl {url}/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )
    return "\n".join(lines)


async def serve_until_signal(engine: Engine, listener: socket.socket) -> None:
    """Answer HTTP until SIGINT or SIGTERM. The caller stops the engine."""
    import uvicorn

    from loramux.server.app import create_app

    host, port = listener.getsockname()[:2]
    app = create_app(engine, options=ServerOptions(host=host, port=port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    # uvicorn raises the signal again when it is through; asyncio then cancels this task at its
    # next pause, which must be here and not in the middle of stopping the engine.
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve(sockets=[listener])
        await asyncio.sleep(0)
