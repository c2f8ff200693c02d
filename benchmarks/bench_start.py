"""How long does an engine take to start on a GPU, with and without what compilers have kept?

Each start is a process of its own, from its first line until the engine could take a request. The
first finds the caches of torch's compiler and of Triton empty, the others what the first has left.
The weights are random, so none are read; FlashInfer's kernels are there, or compiled by the first.

Then an adapter comes whose graphs are not captured at start: how long its first steps take, and how
long it takes to capture all of its graphs in spare time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loramux.engine.build import Parts

_BEGAN = time.perf_counter()

PARTS = {
    "model examined": ("loramux.engine.build", "examine"),
    "worker made": ("loramux.engine.build", "Worker"),
    "largest step measured": ("loramux.engine.build", "measure"),
    "self-check": ("loramux.engine.build", "self_check"),
}
"""What a start calls once, by module and name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    # Not from bench_step, which imports torch: only the starts themselves are to.
    parser.add_argument("--shape", choices=("llama-8b", "qwen3-30b-a3b"), default="llama-8b")
    parser.add_argument("--layers", type=int, help="those of the shape by default")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--device-cache", metavar="SIZE", help="as in loramux serve")
    parser.add_argument("--kv-cache", metavar="SIZE", default="40GiB")
    parser.add_argument("--rank", type=int, default=64, help="of the adapter that comes then")
    parser.add_argument("--rows", type=int, default=16, help="of its steps")
    parser.add_argument("--starts", type=int, default=2, help="the first one included")
    parser.add_argument("--child", action="store_true", help="be one start")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(start(arguments)))
        return
    from benchmarks.report import finish

    with tempfile.TemporaryDirectory() as caches:
        starts = [child(caches) for _ in range(arguments.starts)]
    given = {name: value for name, value in vars(arguments).items() if name != "child"}
    finish("start", given, {"starts": starts}, arguments.out)


def child(caches: str) -> dict[str, object]:
    """Start an engine in another process, with this one's arguments."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
    }
    command = [sys.executable, "-m", "benchmarks.bench_start", *sys.argv[1:], "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def start(arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds of one start, and of its parts."""
    import torch

    from benchmarks.bench_step import SHAPES

    imported = time.perf_counter()
    parts_seconds = clocked()
    parts = SHAPES[arguments.shape](
        max_loras=arguments.slots,
        max_num_seqs=arguments.max_num_seqs,
        kv_cache=arguments.kv_cache,
        device_cache=arguments.device_cache,
        **({} if arguments.layers is None else {"layers": arguments.layers}),
    )
    ready = time.perf_counter()
    return {
        "gpu": torch.cuda.get_device_name(),
        "seconds": round(ready - _BEGAN, 1),
        "imports": round(imported - _BEGAN, 1),
        **{name: round(value, 1) for name, value in asdict(parts.captured).items()},
        "parts": {name: round(value, 1) for name, value in parts_seconds.items()},
        "first_adapter": first_adapter(parts, arguments.rank, arguments.rows),
    }


def clocked() -> dict[str, float]:
    """Seconds of each of ``PARTS``, filled in as they are called."""
    seconds: dict[str, float] = {}
    for part, (module, name) in PARTS.items():
        holder = importlib.import_module(module)
        setattr(holder, name, partial(_timed, seconds, part, getattr(holder, name)))
    return seconds


def _timed(
    seconds: dict[str, float], part: str, called: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    began = time.perf_counter()
    try:
        return called(*args, **kwargs)
    finally:
        seconds[part] = time.perf_counter() - began


def first_adapter(parts: Parts, rank: int, rows: int) -> dict[str, object]:
    """Milliseconds of the first steps with an adapter, and seconds to capture all that it needs."""
    import torch

    from benchmarks.bench_step import decode_plan
    from benchmarks.gpu_models import random_prepared
    from loramux.plan import SlotLoad
    from loramux.types import Slot
    from loramux.worker.inputs import build_inputs

    worker = parts.worker
    prepared = random_prepared(worker, "first", rank, seed=0)
    worker.install(prepared)
    worker.apply([SlotLoad(Slot(0), prepared.adapter_id, generation=1)])
    plan = decode_plan([0] * rows, context=256)
    inputs = build_inputs(plan, {})
    steps: list[float] = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        worker.forward(inputs, plan.sequences)
        torch.cuda.synchronize()
        steps.append(round(1000 * (time.perf_counter() - began), 1))
    began, num_graphs = time.perf_counter(), 0
    while worker.use_spare_time():
        num_graphs += 1
    return {
        "steps_ms": steps,
        "graphs": num_graphs,
        "graphs_seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    main()
