"""What do streams over HTTP cost the engine's steps?

The real server over the real engine, whose forward is replaced by a wait of some milliseconds, as
for a GPU. One process serves, another reads all streams; what is compared is how long steps take
and how much processor time the server needs for each token.
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
from pathlib import Path
from urllib.request import urlopen

import torch

from benchmarks.churn import engine_over
from benchmarks.llama import word_tokenizer
from benchmarks.report import finish
from loramux.config import AdapterOptions, EngineOptions, SchedulerOptions, ServerOptions
from loramux.engine.build import assemble
from loramux.model.load import adopt
from loramux.server.app import create_app
from loramux.server.listen import bind, serve_app
from loramux.testing import tiny_model

_VOCAB = 2000
_OUTPUT_TOKENS = 300


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
    for interval in arguments.intervals:
        with server(interval, arguments.forward) as (process, port):
            for streams in arguments.streams:
                name = f"{streams} streams, an event every {interval} s"
                results[name] = measure(process, port, streams)
                print(name, results[name], flush=True)
    finish("http", vars(arguments), results, arguments.out)


async def serve(interval: float, forward_seconds: float) -> None:
    """Serve until a signal; the port is the first line of the output."""
    torch.set_num_threads(1)
    options = EngineOptions(
        adapters=AdapterOptions(max_loras=4),
        scheduler=SchedulerOptions(max_num_seqs=256, max_step_tokens=8192, kv_cache="64MiB"),
    )
    model = tiny_model(vocab_size=_VOCAB, num_layers=1, max_positions=1024)
    parts = assemble(adopt("tiny", model), word_tokenizer(_VOCAB), options, "tiny")
    logits = torch.randn(256, _VOCAB)

    def forward(inputs: object, sequences: Sequence[object]) -> torch.Tensor:
        time.sleep(forward_seconds)
        return logits[: len(sequences)]

    parts.worker.forward = forward
    engine = engine_over(parts)
    await engine.start()
    with bind("127.0.0.1", 0) as sock:
        print(sock.getsockname()[1], flush=True)
        await serve_app(create_app(engine, options=ServerOptions(stream_interval=interval)), sock)
    await engine.stop()


@contextmanager
def server(interval: float, forward: float) -> Iterator[tuple[int, int]]:
    """Process id and port of a server."""
    command = [sys.executable, "-m", "benchmarks.bench_http"]
    command += ["--serve", str(interval), "--forward", str(forward)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            wait_until_ready(port)
            yield process.pid, port
        finally:
            process.terminate()


def wait_until_ready(port: int) -> None:
    while True:
        try:
            urlopen(f"http://127.0.0.1:{port}/ready").close()
            return
        except OSError:
            time.sleep(0.05)


def measure(process: int, port: int, streams: int) -> dict[str, float]:
    read_all(port, min(streams, 8))
    steps, seconds = step_times(port)
    processor, began = processor_seconds(process), time.perf_counter()
    read_all(port, streams)
    elapsed = time.perf_counter() - began
    used = processor_seconds(process) - processor
    more_steps, more_seconds = step_times(port)
    tokens = streams * _OUTPUT_TOKENS
    return {
        "step, ms": round(1000 * (more_seconds - seconds) / (more_steps - steps), 2),
        "tokens/s": round(tokens / elapsed),
        "processor time a token, us": round(1e6 * used / tokens, 1),
    }


def read_all(port: int, streams: int) -> None:
    """Ask, and read every stream to its end in one thread, so that reading costs little."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
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
