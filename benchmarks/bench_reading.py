"""How long does the thread of the steps wait while a large adapter is read beside it?

A mixture of 48 layers of 128 small experts, and an adapter on every projection of every expert,
which is 18,432 modules. One thread reads it, as the engine's loader does; another wants to go on
every 0.3 ms, as one does that launches step after step. First with Python's own settings, then with
those of an engine's process (``engine.own_process``).
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.gpu_models import word_tokenizer
from benchmarks.report import finish
from loramux.config import AdapterOptions, EngineOptions, SchedulerOptions
from loramux.engine.build import assemble
from loramux.engine.own_process import keep_steps_steady
from loramux.model.load import adopt
from loramux.testing import random_adapter
from loramux.worker.worker import Worker

_VOCAB = 160
_PAUSE = 0.0003
_LONG = 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    worker = mixture(arguments.layers, arguments.experts)
    with tempfile.TemporaryDirectory() as folder:
        parts = ("gate_proj", "up_proj", "down_proj")
        adapter = random_adapter(Path(folder), worker.layout, rank=8, targets=parts, seed=1)
        results = {"Python's settings": [waits(worker, adapter) for _ in range(arguments.repeats)]}
        keep_steps_steady()
        results["an engine's"] = [waits(worker, adapter) for _ in range(arguments.repeats)]
    for name, runs in results.items():
        print(name, *runs, sep="\n  ")
    finish("reading", vars(arguments), results, arguments.out)


def mixture(layers: int, experts: int) -> Worker:
    config = Qwen3MoeConfig(
        vocab_size=_VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=experts, num_experts_per_tok=2, max_position_embeddings=64, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    options = EngineOptions(
        adapters=AdapterOptions(max_loras=1, device_cache="128MiB", host_cache="512MiB"),
        scheduler=SchedulerOptions(max_num_seqs=2, max_step_tokens=16, kv_cache="16MiB"),
    )
    return assemble(adopt("mixture", model), word_tokenizer(_VOCAB), options, "base").worker


def waits(worker: Worker, adapter: Path) -> dict[str, float]:
    """Seconds that reading took, and milliseconds that the other thread waited beyond its pause."""
    done = threading.Event()

    def read() -> None:
        try:
            worker.read_adapter("large", adapter)
        finally:
            done.set()

    reader = threading.Thread(target=read)
    found: list[float] = []
    started = last = time.perf_counter()
    reader.start()
    while not done.is_set():
        time.sleep(_PAUSE)
        now = time.perf_counter()
        found.append(now - last - _PAUSE)
        last = now
    reader.join()
    return {
        "seconds": round(last - started, 2),
        "longest, ms": round(max(found) * 1000, 1),
        "p99, ms": round(sorted(found)[len(found) * 99 // 100] * 1000, 1),
        "in waits above 5 ms, ms": round(sum(wait for wait in found if wait > _LONG) * 1000),
    }


if __name__ == "__main__":
    main()
