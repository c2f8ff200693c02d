"""Places on other machines that adapters come from, as servers of this one that can misbehave."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.adapter_files import llama_layout, lora_config, pairs, safetensors_bytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def adapter_bytes(seed: int = 1) -> dict[str, bytes]:
    """The two files of a small adapter; another seed has other weights of the same size."""
    shapes = pairs(llama_layout(), "q_proj", "v_proj")
    return {
        CONFIG: json.dumps(lora_config()).encode(),
        WEIGHTS: safetensors_bytes(shapes, fill=bytes([0, 0, seed, 60])),
    }


@dataclass
class Served:
    """One file and how the server hands it out."""

    data: bytes
    etag: str | None = ""
    """Empty: a digest of the data; None: the file has no version."""
    status: int = 200
    content_type: str = "application/octet-stream"
    announced: int | None = -1
    """Content-Length: -1 is the truth, None sends none."""
    break_after: int | None = None
    """Bytes of one answer after which the connection is closed."""
    ranges: bool = True
    location: str | None = None
    error_code: str = ""
    """How the hub tells apart what has one status."""
    head_status: int | None = None
    head_announced: int | None = None
    """Content-Length of HEAD, where it is another."""
    wait: Callable[[], object] = field(default=lambda: None)
    """Called before the body of a GET."""

    @property
    def version(self) -> str | None:
        return f'"{sha256(self.data).hexdigest()[:16]}"' if self.etag == "" else self.etag


@dataclass(frozen=True)
class Asked:
    """One request: what was asked for, and how many bytes of body went out."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    sent: int


class FileServer:
    """Serves ``files`` (path to Served) with HEAD, GET, Range and If-Range; keeps a record."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.asked: list[Asked] = []
        self.url = ""

    def put(self, folder: str, files: dict[str, bytes], **how: Any) -> None:
        for name, data in files.items():
            self.files[f"{folder}{name}"] = Served(data, **how)

    def sent(self, suffix: str = "") -> int:
        """Bytes that travelled, of paths that end in ``suffix``."""
        return sum(a.sent for a in self.asked if a.path.endswith(suffix))

    def gets(self, suffix: str = "") -> int:
        return sum(a.method == "GET" and a.path.endswith(suffix) for a in self.asked)

    @contextmanager
    def running(self) -> Iterator[FileServer]:
        places = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def do_GET(self) -> None:
                self._answer(body=True)

            def log_message(self, *_: object) -> None:
                pass

            def _answer(self, *, body: bool) -> None:
                path = urlsplit(self.path).path
                served = places.find(path)
                sent = 0
                try:
                    sent = _send(self, served, body=body)
                finally:
                    asked = self.headers.get("Range")
                    places.asked.append(
                        Asked(self.command, path, asked, self.headers.get("Authorization"), sent)
                    )

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that has gone."""

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def find(self, path: str) -> Served:
        return self.files.get(path, Served(b"no such file", status=404))


def _send(handler: BaseHTTPRequestHandler, served: Served, *, body: bool) -> int:
    """Answer one request; the bytes of body that went out."""
    status, start = served.status, 0
    if not body and served.head_status is not None:
        status = served.head_status
    found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    fits = handler.headers.get("If-Range") in (None, served.version)
    if status == 200 and body and found and served.ranges and fits:
        start = int(found[1])
        status = 206 if start < len(served.data) else 416
    data = served.data[start:] if status != 416 else b""
    handler.send_response(302 if served.location else status)
    if served.location:
        handler.send_header("Location", served.location)
        data = b""
    if status == 206:
        whole = len(served.data)
        handler.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
    length = len(data) if served.announced == -1 else served.announced
    if not body and served.head_announced is not None:
        length = served.head_announced
    if length is None:
        handler.send_header("Connection", "close")
        handler.close_connection = True
    else:
        handler.send_header("Content-Length", str(length))
    if served.version is not None:
        handler.send_header("ETag", served.version)
    if served.error_code:
        handler.send_header("X-Error-Code", served.error_code)
    handler.send_header("Content-Type", served.content_type)
    handler.end_headers()
    if not body:
        return 0
    served.wait()
    cut = data if served.break_after is None else data[: served.break_after]
    handler.wfile.write(cut)
    if len(cut) < len(data) or (length is not None and length != len(cut)):
        handler.close_connection = True
    return len(cut)


class FakeHub(FileServer):
    """Repositories with commits, by the paths of the hub: model info and resolved files."""

    def __init__(self) -> None:
        super().__init__()
        self._commits: dict[tuple[str, str], str] = {}

    def commit(
        self, repo: str, files: dict[str, bytes], *, revision: str = "main", lfs: str = WEIGHTS
    ) -> str:
        """A new commit at ``revision``; its id."""
        text = repo + revision + "".join(sha256(d).hexdigest() for d in files.values())
        commit = sha256(text.encode()).hexdigest()[:40]
        siblings = []
        for name, data in files.items():
            digest = sha256(data).hexdigest()
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": digest[:40]}
            if name.endswith(lfs):
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
            self.files[f"/{repo}/resolve/{commit}/{name}"] = Served(data)
        info = {"id": repo, "_id": "1", "sha": commit, "siblings": siblings, "tags": []}
        for known in (revision, commit):
            self.files[f"/api/models/{repo}/revision/{known}"] = Served(
                json.dumps(info).encode(), content_type="application/json"
            )
        return commit


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """All that lies in a cache but its locks, to be compared byte for byte."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "lock" in path.parts[len(folder.parts)] or path.is_dir():
            continue
        found[name] = str(path.readlink()) if path.is_symlink() else path.read_bytes()
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)
