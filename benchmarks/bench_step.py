"""What does one decode step cost, base against LoRA, and where does the time go?

A shape with random weights; every sequence has ``--context`` tokens. The step is the
engine's own, from filling its inputs to the logits; only the choice of tokens is left out.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_models import add_adapters, llama_engine, qwen_moe_engine
from benchmarks.report import finish
from benchmarks.workloads import BASE, rows_of
from loramux.engine.build import Parts
from loramux.plan import SequenceStep, SlotLoad, StepPlan
from loramux.types import RequestId, Slot
from loramux.worker.inputs import build_inputs

KINDS = (
    ("LoRA shrink", r"shrink"),
    ("LoRA expand", r"expand"),
    ("attention", r"Decode|PersistentVariableLengthMerge|MergeStates|BatchPrefill|_write_kernel"),
    ("experts", r"(top_k|rank|sort|cut|split|product|gate|gate_runs|combine)_kernel"),
    ("products", r"gemm|nvjet|cutlass|gemv|splitK|cublas"),
    ("between", r"triton_|elementwise|reduce|index|copy|Memcpy|Memset|embedding|arange|cat"),
)

SHAPES = {"llama-8b": llama_engine, "qwen3-30b-a3b": qwen_moe_engine}

_PROMPT_TOKENS = 4096
"""Of the contexts that are computed in one step; a longer one has a step of its own."""
_STEPS = 10
"""Steps one behind the other, so that the host is ahead of the GPU as it is in the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--layers", type=int, help="those of the shape by default")
    parser.add_argument("--device-cache", metavar="SIZE", help="as in loramux serve")
    parser.add_argument("--kv-cache", metavar="SIZE", default="40GiB")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    layers = {} if arguments.layers is None else {"layers": arguments.layers}
    parts = SHAPES[arguments.shape](
        max_loras=arguments.slots,
        max_num_seqs=max(arguments.rows),
        kv_cache=arguments.kv_cache,
        device_cache=arguments.device_cache,
        host_cache=arguments.device_cache or "16GiB",
        **layers,
    )
    compute_contexts(parts, max(arguments.rows), arguments.context, arguments.slots)
    for rank in arguments.ranks:
        place_adapters(parts, arguments.slots, rank)
        for rows in arguments.rows:
            for popularity in ("base", "identical", "distinct", "half"):
                if rows == 1 and popularity in ("distinct", "half"):
                    continue
                name = f"r{rank} T{rows} {popularity}"
                results[name] = measure(parts, rows, popularity, arguments)
                print(name, results[name], flush=True)
    finish("step", vars(arguments) | {"gpu": torch.cuda.get_device_name()}, results, arguments.out)


def compute_contexts(parts: Parts, rows: int, context: int, base_slot: int) -> None:
    """Have keys and values of every sequence: experts are chosen by what they make of a token."""
    every = decode_plan([base_slot] * rows, context).sequences
    at_once = max(1, _PROMPT_TOKENS // context)
    for first in range(0, rows, at_once):
        sequences = [
            step._replace(
                token_ids=[(7919 * i + 1009 * place) % 30_000 for place in range(context)], start=0
            )
            for i, step in enumerate(every[first : first + at_once], first)
        ]
        plan = StepPlan((), tuple(sequences))
        parts.worker.forward(build_inputs(plan, {}), plan.sequences)


def place_adapters(parts: Parts, count: int, rank: int) -> None:
    """Fill every slot with an adapter of this rank."""
    names = [f"r{rank}-{i}" for i in range(count)]
    add_adapters(parts, names, [rank])
    ids = [info.adapter_id for info in parts.core.adapters.infos() if info.name in names]
    # Generations far beyond those that the engine would give, growing from rank to rank.
    parts.worker.apply([SlotLoad(Slot(i), a, rank * 1000 + i) for i, a in enumerate(ids)])


def measure(
    parts: Parts, rows: int, popularity: str, arguments: argparse.Namespace
) -> dict[str, object]:
    """Milliseconds of one step, and microseconds of its parts."""
    slots = [
        arguments.slots if s == BASE else s for s in rows_of(popularity, rows, arguments.slots)
    ]
    plan = decode_plan(slots, arguments.context)
    inputs = build_inputs(plan, {})

    def step() -> None:
        parts.worker.forward(inputs, plan.sequences)

    for _ in range(3):
        step()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_STEPS):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _STEPS)
    return {"ms": round(statistics.median(times), 3)} | breakdown(step)


def decode_plan(slots: Sequence[int], context: int) -> StepPlan:
    """One token for each sequence, whose blocks lie one behind the other."""
    per_sequence = -(-(context + 1) // 16)
    return StepPlan(
        (),
        tuple(
            SequenceStep(
                RequestId(f"{i}"),
                [7 + i],
                context,
                tuple(range(i * per_sequence, (i + 1) * per_sequence)),
                Slot(slot),
                prompt_logprobs=0,
                next_prompt_tokens=[5],
            )
            for i, slot in enumerate(slots)
        ),
    )


def breakdown(step: Callable[[], None]) -> dict[str, object]:
    """Microseconds of a step by kind of kernel (kernels that run side by side both count)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kinds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((k for k, pattern in KINDS if re.search(pattern, event.name)), "other")
        kinds[kind] += event.device_time_total
        launches[kind] += 1
        if kind == "other":
            unknown[event.name[:80]] += event.device_time_total
    return {
        "us": {kind: round(us) for kind, us in kinds.items()},
        "launches": dict(launches),
        "other": {name: round(us) for name, us in unknown.most_common(5)},
    }


if __name__ == "__main__":
    main()
