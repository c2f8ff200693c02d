"""``loramux demo --serve``: the demo's engine goes on behind HTTP."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Sequence

from loramux.engine.interface import Engine
from loramux.server.app import create_app
from loramux.server.listen import serve_app


async def serve_engine(
    engine: Engine, sock: socket.socket, models: Sequence[str], prompt: str
) -> None:
    """Say how to ask each of ``models``, then answer HTTP until a signal. The engine goes on."""
    print(curl_examples(sock, models, prompt), flush=True)
    await serve_app(create_app(engine), sock)


def curl_examples(sock: socket.socket, models: Sequence[str], prompt: str) -> str:
    """Shell lines that list the models and ask the first and the last one, ready to paste."""
    host, port = sock.getsockname()[:2]
    url = f"http://{host}:{port}/v1"
    lines = [f"serving at {url} until Ctrl-C; try:", f"  curl {url}/models"]
    for model in (models[0], models[-1]):
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 40}
        lines.append(
            f"  curl {url}/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
        )
    return "\n".join(lines)
