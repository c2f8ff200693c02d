"""What do streams over HTTP cost the engine's steps?

The real server over the real engine, whose forward is replaced by a wait of some milliseconds, as
for a GPU. One process serves, one has the engine, and another reads all streams; what is compared
is how long steps take, with the same sequences that nobody reads, and how much processor time a
token takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from benchmarks.paced import build
from benchmarks.report import finish
from loramux.config import ServerOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.service_process import ServiceProcess
from loramux.server.app import create_app
from loramux.server.listen import bind, serve_app
from loramux.types import GenerationRequest, SamplingParams

_OUTPUT_TOKENS = 300
_PROMPT = (5, 6, 7)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.0, 0.02, 0.05])
    parser.add_argument("--forward", type=float, default=0.007, help="seconds of a step's wait")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.forward))
        return
    results: dict[str, dict[str, float]] = {}
    for streams in arguments.streams:
        alone = asyncio.run(step_alone(streams, arguments.forward))
        results[f"{streams} sequences, no HTTP"] = {"step, ms": round(alone, 2)}
    for interval in arguments.intervals:
        with server(interval, arguments.forward) as running:
            for streams in arguments.streams:
                name = f"{streams} streams, an event every {interval} s"
                results[name] = measure(running, streams)
    for name, figures in results.items():
        print(name, figures)
    finish("http", vars(arguments), results, arguments.out)


async def serve(interval: float, forward_seconds: float) -> None:
    """Serve until a signal; the engine's process and the port are the first line of the output."""
    service = ServiceProcess(partial(build, forward_seconds))
    engine = AsyncEngine(service)
    await engine.start()
    with bind("127.0.0.1", 0) as sock:
        print(service.process_id, sock.getsockname()[1], flush=True)
        await serve_app(create_app(engine, options=ServerOptions(stream_interval=interval)), sock)
    await engine.stop()


async def step_alone(sequences: int, forward_seconds: float) -> float:
    """Milliseconds of a step in which so many sequences run, and nobody asks over HTTP."""
    engine = AsyncEngine(ServiceProcess(partial(build, forward_seconds)))
    await engine.start()
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT_TOKENS, ignore_eos=True)
    request = GenerationRequest(prompt_token_ids=_PROMPT, params=params)
    for _ in range(sequences):
        await engine.submit(request)
    while (stats := await engine.stats()).requests_finished < sequences:
        assert engine.failure is None, engine.failure
        await asyncio.sleep(0.1)
    await engine.stop()
    seconds = stats.step_seconds
    return 1000 * seconds.total / sum(seconds.counts)


@dataclass(frozen=True)
class Server:
    """Process ids, and where it listens."""

    http: int
    engine: int
    port: int


@contextmanager
def server(interval: float, forward: float) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.bench_http"]
    command += ["--serve", str(interval), "--forward", str(forward)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            engine, port = map(int, process.stdout.readline().split())
            wait_until_ready(port)
            yield Server(process.pid, engine, port)
        finally:
            process.terminate()


def wait_until_ready(port: int) -> None:
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/ready").close()
            return
        except OSError:
            time.sleep(0.05)


def measure(server: Server, streams: int) -> dict[str, float]:
    read_all(server.port, min(streams, 8))
    steps, seconds = step_times(server.port)
    http, engine = processor_seconds(server.http), processor_seconds(server.engine)
    began = time.perf_counter()
    read_all(server.port, streams)
    elapsed = time.perf_counter() - began
    http, engine = (
        processor_seconds(process) - before
        for process, before in ((server.http, http), (server.engine, engine))
    )
    more_steps, more_seconds = step_times(server.port)
    tokens = streams * _OUTPUT_TOKENS
    return {
        "step, ms": round(1000 * (more_seconds - seconds) / (more_steps - steps), 2),
        "tokens/s": round(tokens / elapsed),
        "processor time of HTTP a token, us": round(1e6 * http / tokens, 1),
        "processor time of the engine a token, us": round(1e6 * engine / tokens, 1),
    }


def read_all(port: int, streams: int) -> None:
    """Ask, and read every stream to its end in one thread, so that reading costs little."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": _PROMPT,
            "max_tokens": _OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with selectors.DefaultSelector() as selector:
        for _ in range(streams):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(head.encode() + body)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            time.sleep(0.01)
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                data = sock.recv(1 << 18)
                key.data[:] = (key.data + data)[-16:]
                if not data:
                    raise SystemExit("a stream broke off")
                if b"[DONE]" in key.data or b"[DONE]" in data:
                    selector.unregister(sock)
                    sock.close()


def step_times(port: int) -> tuple[float, float]:
    """Steps so far, and their seconds."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    name = "loramux_step_seconds"
    return float(values[f"{name}_count"]), float(values[f"{name}_sum"])


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
