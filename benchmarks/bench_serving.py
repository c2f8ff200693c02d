"""How does the server do under load, over HTTP, with many streams at once?

Requests of a trace (``traces.py``) are sent as streams to a server: a running one (``--url``), or
one that is started for this, on the demo's base with its six adapters. Every stream must end as it
should; the first one that does not ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import numpy as np

from benchmarks.report import finish
from benchmarks.traces import Arrival, Lengths, draw_trace
from loramux.demo.adapters import default_adapters_folder, find_adapters
from loramux.demo.base import demo_base

_READY = re.compile(r"ready at (http://\S+?),")
_TIMEOUT_SECONDS = 3600


@dataclass(frozen=True)
class Answer:
    """What one stream has come to; times in seconds."""

    first: float
    """From the time of arrival to the first text."""
    gaps: tuple[float, ...]
    """Between one event with text and the next."""
    tokens: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", help="of a running server; default: start one")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests per second; 0: all at once"
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: a Poisson process")
    parser.add_argument(
        "--popularity",
        choices=("uniform", "skewed", "distinct"),
        default="uniform",
        help="who asks whom; skewed: a power law, distinct: all in turns",
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 32], metavar=("LOW", "HIGH"))
    parser.add_argument("--max-loras", type=int, default=4, help="of the server that is started")
    parser.add_argument("--dtype", default="auto", help="of the server that is started")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args(argv)
    with server(arguments) as url:
        models = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
        trace = draw(arguments, len(models))
        began = time.perf_counter()
        answers = asyncio.run(ask_all(url, models, trace))
        seconds = time.perf_counter() - began
    figures = figures_of(answers, seconds)
    for name, value in figures.items():
        print(f"{name:28} {value:12.3f}")
    finish("serving", vars(arguments) | {"models": len(models)}, figures, arguments.out)


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of the server under test."""
    if arguments.url is not None:
        yield arguments.url.rstrip("/")
        return
    named = [
        f"--adapter={name}={path}"
        for name, path in find_adapters(default_adapters_folder()).items()
    ]
    command = [sys.executable, "-m", "loramux", "serve", str(demo_base()), "--port=0", *named]
    command += ["--served-model-name=base", f"--max-loras={arguments.max_loras}"]
    command += [f"--dtype={arguments.dtype}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := _READY.search(line):
                    break
            else:
                raise SystemExit("the server has not started")
            yield found[1]
        finally:
            process.terminate()


def draw(arguments: argparse.Namespace, num_models: int) -> list[Arrival]:
    """Whom each request asks is an index into the names of all models, the base among them."""
    trace = draw_trace(
        rate=arguments.rate or 1.0,
        duration=arguments.requests / (arguments.rate or 1.0),
        burstiness=arguments.burstiness,
        alpha=0.3 if arguments.popularity == "skewed" else 1.0,
        num_adapters=num_models,
        lengths=Lengths(*arguments.lengths),
        seed=arguments.seed,
    )
    if arguments.popularity == "distinct":
        trace = [replace(arrival, adapter=i % num_models) for i, arrival in enumerate(trace)]
    return trace if arguments.rate else [replace(arrival, at=0.0) for arrival in trace]


async def ask_all(url: str, models: Sequence[str], trace: Sequence[Arrival]) -> list[Answer]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_TIMEOUT_SECONDS) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(ask(client, models[arrival.adapter], arrival, began))
                for arrival in trace
            ]
    return [task.result() for task in tasks]


async def ask(client: httpx.AsyncClient, model: str, arrival: Arrival, began: float) -> Answer:
    """Send a request when its time has come, and read its stream to the end."""
    due = began + arrival.at
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    body = {
        "model": model,
        "prompt": [10] * arrival.prompt_tokens,
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    times: list[float] = []
    tokens, ended = 0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
            elif data:
                chunk = json.loads(data)
                if "error" in chunk:
                    raise SystemExit(f"a stream failed: {chunk['error']['message']}")
                times.append(time.perf_counter())
                tokens += sum(len(choice["token_ids"]) for choice in chunk["choices"])
    if not ended or tokens != arrival.output_tokens:
        raise SystemExit(f"a stream ended with {tokens} of {arrival.output_tokens} tokens")
    return Answer(times[0] - due, tuple(np.diff(times).tolist()), tokens)


def figures_of(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    first = [answer.first for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps] or [0.0]
    figures = {
        "seconds": seconds,
        "requests/s": len(answers) / seconds,
        "output tokens/s": sum(answer.tokens for answer in answers) / seconds,
        "first token p50, s": np.quantile(first, 0.5),
        "first token p99, s": np.quantile(first, 0.99),
        "between tokens p50, ms": 1000 * np.quantile(gaps, 0.5),
        "between tokens p99, ms": 1000 * np.quantile(gaps, 0.99),
    }
    return {name: round(float(value), 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
