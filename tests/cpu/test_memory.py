"""How memory is shared out: arithmetic, the step that is measured, and what the log says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from loramux.config import BLOCK_SIZE, StepLimits
from loramux.errors import ConfigError
from loramux.lora.layers import Form
from loramux.ops.attention import AttentionLayer, AttentionParams, KvShape
from loramux.plan import StepPlan
from loramux.testing import tiny_model
from loramux.types import Slot
from loramux.worker.graphs import GraphKey
from loramux.worker.memory import (
    DeviceUse,
    KvSizes,
    blocks_of,
    kv_budget,
    largest_step,
    longest_part,
    must_fit,
    weight_bytes,
)
from loramux.worker.memory_report import GpuMemory, MemoryReport
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import BASE, Served
from tests.cpu.test_compiled_layers import served as compiled_served

SIZES = KvSizes(block_bytes=1000, max_model_len=100, max_num_seqs=3)  # 7 blocks a sequence


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    layer = AttentionLayer(8, KvShape(2, 64, 32), AttentionParams(1.0))
    sizes = KvSizes.of({0: layer, 1: layer}, torch.bfloat16, max_model_len=17, max_num_seqs=1)
    assert sizes.block_bytes == BLOCK_SIZE * 2 * 2 * (64 + 32) * 2
    assert sizes.sequence_blocks == 2


def test_a_chosen_cache_is_as_large_as_chosen() -> None:
    assert SIZES.blocks_chosen(99_999) == 99


def test_a_default_cache_is_no_larger_than_all_sequences_can_need() -> None:
    assert SIZES.blocks_by_default(99_999) == SIZES.blocks_planned(99_999) == 21
    assert SIZES.blocks_by_default(9_999) == SIZES.blocks_planned(9_999) == 9


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"holds 96 tokens.*--kv-cache 7000.*-len 96 or less"):
        SIZES.blocks_chosen(6_999)
    with pytest.raises(ConfigError, match=r"larger --gpu-memory.*-len 96 or less"):
        SIZES.blocks_planned(6_999)


def test_no_memory_left_at_all_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        SIZES.blocks_planned(-5_000_000)


def test_the_budget_is_what_the_share_leaves_beside_everything_else() -> None:
    use = DeviceUse(total=10_000, in_use=3_000, step=800)
    assert kv_budget(use, 0.9, StepLimits(10, 100), [], num_layers=4) == 5_200
    assert kv_budget(use, 0.5, StepLimits(10, 100), [], num_layers=4) == 1_200


def test_graphs_take_their_part_by_number_layers_and_rows() -> None:
    use = DeviceUse(total=10**12, in_use=0, step=10**9)

    def taken(*buckets: int, num_layers: int = 4) -> int:
        graphs = [GraphKey(bucket, Form.NONE) for bucket in buckets]
        budgets = [kv_budget(use, 1.0, StepLimits(10, 100), g, num_layers) for g in ([], graphs)]
        return budgets[0] - budgets[1]

    each = taken(10) - 10**8  # a tenth of the largest step's rows
    assert each > 0
    assert taken(10, 4, 2) == 10**8 + 3 * each
    assert taken(2, 20) == 2 * 10**8 + 2 * each
    assert taken(10, num_layers=8) == 10**8 + 2 * each


def check_step(plan: StepPlan, limits: StepLimits, max_model_len: int) -> list[int]:
    counts = [len(s.token_ids) for s in plan.sequences]
    assert len(counts) == limits.max_num_seqs
    assert 1 <= min(counts) <= max(counts) <= max_model_len
    for sequence, count in zip(plan.sequences, counts, strict=True):
        assert len(sequence.block_table) == blocks_of(count)
        assert len(sequence.next_prompt_tokens) == count - 1
        assert sequence.sample is not None
    longest = longest_part(limits, max_model_len)
    assert max(counts) == longest
    assert max(b for s in plan.sequences for b in s.block_table) == blocks_of(longest) - 1
    return counts


@pytest.mark.parametrize(
    ("limits", "max_model_len", "tokens"),
    [
        (StepLimits(4, 40), 100, [37, 1, 1, 1]),
        (StepLimits(4, 40), 17, [17, 17, 5, 1]),
        (StepLimits(4, 40), 5, [5, 5, 5, 5]),  # a step can hold no more
        (StepLimits(4, 4), 100, [1, 1, 1, 1]),
        (StepLimits(1, 40), 100, [40]),
    ],
)
def test_the_largest_step_has_as_many_tokens_and_sequences_as_one_can(
    limits: StepLimits, max_model_len: int, tokens: Sequence[int]
) -> None:
    plan = largest_step(limits, max_model_len, Slot(0))
    assert check_step(plan, limits, max_model_len) == list(tokens)


@pytest.mark.parametrize("slot", [0, BASE])
def test_the_largest_step_runs(tmp_path: Path, slot: int) -> None:
    served = Served(tmp_path)
    served.worker.apply([served.load(0, "one")])
    results = served.worker.launch(largest_step(StepLimits(8, 64), 50, Slot(slot))).result()
    assert len(results.sequences) == 8
    assert all(result.error is None for result in results.sequences)
    assert len(results.sequences[0].prompt_logprobs) == 49


def test_the_measured_step_compiles_nothing(tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiler = CompileCounter()
    served = compiled_served(tmp_path, compiler)
    with torch.compiler.set_stance("force_eager"):
        served.worker.launch(largest_step(StepLimits(8, 64), 50, Slot(0))).result()
    assert compiler.frame_count == 0
    served.worker.launch(largest_step(StepLimits(8, 64), 50, Slot(0))).result()
    assert compiler.frame_count > 0


def test_weights_that_are_shared_count_once() -> None:
    model = tiny_model()
    own = sum(p.nbytes for p in model.parameters())
    model.register_buffer("again", next(model.parameters()).detach()[1:])
    assert weight_bytes(model) == pytest.approx(own, rel=0.01)


def test_a_gpu_that_is_too_small_at_start_is_a_mistake_in_the_options() -> None:
    refused = pytest.raises(ConfigError, match=r"the KV cache does not fit.*--kv-cache")
    with refused, must_fit("the KV cache"):
        raise torch.OutOfMemoryError("CUDA out of memory")


REPORT = MemoryReport(
    weights=16_060_000_000,
    kv_cache=97_000_000_000,
    num_blocks=46_000,
    block_size=16,
    arena=1_350_000_000,
    num_slots=8,
    adapters={16: 42_000_000, 64: 168_000_000},
)


def test_report_of_a_cpu() -> None:
    assert REPORT.lines() == [
        "  weights                  16.06 GB",
        "  KV cache                 97.00 GB  46,000 blocks, 736,000 tokens",
        "  adapters                  1.35 GB  8 slots; room for 32 of rank 16, 8 of rank 64",
    ]


def test_report_of_a_gpu_adds_what_it_holds_beside_and_what_is_left() -> None:
    gpu = GpuMemory(
        lora_workspace=75_500_000,
        step=3_000_000_000,
        max_step_tokens=8192,
        num_graphs=54,
        graphs=900_000,
        in_use=120_000_000_000,
        total=150_000_000_000,
    )
    lines = MemoryReport(**{**vars(REPORT), "gpu": gpu}).lines()
    assert lines[:3] == REPORT.lines()
    assert lines[3:] == [
        "  LoRA workspace           75.50 MB",
        "  graphs                  900.00 kB  54 captured",
        "  activations               3.00 GB  largest step, 8,192 tokens",
        "  in use between steps    120.00 GB  by other processes as well",
        "  in use at the peak      123.00 GB  of 150.00 GB",
        "  free at the peak         27.00 GB",
    ]


def test_the_log_tells_at_start_where_the_memory_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "loramux.engine.build"):
        parts = assemble_tiny(tiny_model(), max_loras=3, kv_blocks=40, device_cache="1MiB")
    [block] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory:")]
    assert "40 blocks, 640 tokens" in block
    assert "3 slots" in block
    assert "1.05 MB" in block
    assert parts.worker.arena_bytes == 2**20
