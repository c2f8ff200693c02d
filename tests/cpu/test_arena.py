"""How large the arena is by default, and what the log says of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from loramux import LLM
from loramux.adapters.registry import Record, Registry
from loramux.errors import AdapterRefused, RegistryUnusable
from loramux.testing import random_adapter, tiny_model
from loramux.types import AdapterId
from loramux.worker import arena
from loramux.worker.arena import Arena, KnownAdapter, default_arena, free_memory
from loramux.worker.memory_report import MemoryReport
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS
from tests.cpu.test_experts import EXPERTS, Weights, build, per_expert, write

SMALL, LARGE = KnownAdapter("small", 30), KnownAdapter("large", 700)
PARTS = ("gate_proj", "up_proj", "down_proj")


# Arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [None, 1600, 10**9])
def test_each_slot_has_room_for_a_plain_adapter(free: int | None) -> None:
    assert default_arena(8, 100, None, free) == Arena(800, slot_bytes=100)
    assert default_arena(8, 100, SMALL, free) == Arena(800, slot_bytes=100)


def test_each_slot_has_room_for_the_largest_known_adapter() -> None:
    assert default_arena(8, 100, LARGE, 10**9) == Arena(5600, slot_bytes=700)


def test_no_more_than_half_of_what_is_free_is_taken_and_the_log_says_what_would_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert default_arena(8, 100, LARGE, 4000) == Arena(2000, slot_bytes=0)
    [warning] = caplog.messages
    assert "has 2,000 bytes, 50% of the memory that is free" in warning
    assert "8 adapters as large as 'large' need 5,600" in warning
    assert warning.endswith("start with --device-cache 5600, or with --max-loras 2")


def test_a_device_too_small_for_plain_adapters_is_told_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert default_arena(8, 100, None, 180) == Arena(90, slot_bytes=0)
    assert "8 adapters of usual size need 800" in caplog.text
    assert "--max-loras 1" in caplog.text


def test_the_free_memory_of_this_machine_is_known() -> None:
    found = free_memory(torch.device("cpu"))
    assert found is None or found > 2**20


# Adapters that are known at start -----------------------------------------------------------------


def on_experts(folder: Path, rank: int) -> Weights:
    weights = per_expert(build("Qwen3MoeConfig"), PARTS, range(EXPERTS), (rank,))
    write(folder, weights)
    return weights


def test_adapters_on_experts_all_have_room_where_they_are_known_at_start(tmp_path: Path) -> None:
    sources = {name: str(tmp_path / name) for name in ("one", "two")}
    for name, rank in (("one", 64), ("two", 60)):
        on_experts(tmp_path / name, rank)
    model = build("Qwen3MoeConfig")
    alone = assemble_tiny(copy.deepcopy(model), max_loras=3)
    parts = assemble_tiny(model, max_loras=3, adapters=sources)
    llm = LLM.over(parts, sources)
    largest = max(info.num_bytes for info in llm.adapters())
    assert parts.worker.arena_bytes == 3 * largest > alone.worker.arena_bytes


def test_an_adapter_on_experts_that_nobody_foresaw_is_refused_with_the_size_that_would_do(
    tmp_path: Path,
) -> None:
    on_experts(tmp_path / "wide", 64)
    model = build("Qwen3MoeConfig")
    with pytest.raises(AdapterRefused) as refused:
        LLM.over(assemble_tiny(copy.deepcopy(model), max_loras=1), {"w": str(tmp_path / "wide")})
    [reason] = refused.value.reasons
    enough = reason.rpartition("--device-cache ")[2].removesuffix(" or more")
    parts = assemble_tiny(model, max_loras=1, device_cache=enough)
    assert LLM.over(parts, {"w": str(tmp_path / "wide")}).adapters()[0].num_bytes == int(enough)


def test_known_adapters_share_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.engine.build.free_memory", lambda device: 2 * 600_000)
    on_experts(tmp_path / "wide", 64)
    sources = {"wide": str(tmp_path / "wide")}
    parts = assemble_tiny(build("Qwen3MoeConfig"), adapters=sources)
    assert parts.worker.arena_bytes == 600_000
    assert LLM.over(parts, sources).adapters()[0].num_bytes < 600_000


def test_what_cannot_be_served_counts_for_nothing_and_is_refused_at_its_load(
    tmp_path: Path,
) -> None:
    weights = {"model.layers.9.mlp.experts.0.up_proj": (torch.ones(4, 32), torch.ones(24, 4))}
    write(tmp_path / "bad", weights)
    sources = {"bad": str(tmp_path / "bad"), "none": str(tmp_path / "nowhere")}
    model = build("Qwen3MoeConfig")
    usual = assemble_tiny(copy.deepcopy(model)).worker.arena_bytes
    parts = assemble_tiny(model, adapters=sources)
    assert parts.worker.arena_bytes == usual
    with pytest.raises(AdapterRefused, match="no such expert"):
        LLM.over(parts, sources)


def record(name: str, num_bytes: int) -> Record:
    return Record(
        name=name, adapter_id=AdapterId(name), source="nowhere", rules=None, pinned=False,
        num_bytes=num_bytes, max_rank=8, vocab_size=None, warnings=(),
    )  # fmt: skip


def test_adapters_of_the_registry_are_known_at_start(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    assemble_tiny(tiny_model(), registry=registry)
    registry.put(record("huge", 10**6))
    parts = assemble_tiny(tiny_model(), max_loras=2, registry=registry)
    assert parts.worker.arena_bytes == 2 * 10**6
    layout = parts.worker.layout
    random_adapter(tmp_path / "a", layout, rank=4, targets=TARGETS, seed=1)
    sources = {"huge": str(tmp_path / "a")}  # which the registry's gives way to
    given = assemble_tiny(tiny_model(), max_loras=2, registry=registry, adapters=sources)
    assert given.worker.arena_bytes < 2 * 10**6


def test_a_registry_of_another_base_is_refused_before_its_sizes_count(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    assemble_tiny(tiny_model(), registry=registry)
    with pytest.raises(RegistryUnusable, match="another base"):
        assemble_tiny(tiny_model().bfloat16(), registry=registry)


def test_no_numbers_are_read_to_know_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_experts(tmp_path / "a", 8)
    layout = assemble_tiny(build("Qwen3MoeConfig")).worker.layout
    monkeypatch.setattr("torch.empty", None)
    size = arena.size_of("a", tmp_path / "a", layout, torch.float32, max_rank=8, lenient=False)
    assert size == 4 * 2 * EXPERTS * (2 * (8 * 32 + 24 * 8) + (8 * 24 + 32 * 8))


# The report ---------------------------------------------------------------------------------------


def test_the_report_tells_experts_and_the_largest_known_adapter() -> None:
    report = MemoryReport(
        weights=0, kv_cache=0, num_blocks=0, block_size=16, arena=26_400_000_000, num_slots=8,
        adapters={16: 42_000_000, 64: 168_000_000},
        with_experts={16: 1_700_000_000, 64: 6_800_000_000},
        largest=KnownAdapter("wide", 3_300_000_000),
    )  # fmt: skip
    assert report.lines()[2].endswith(
        "8 slots; room for 628 of rank 16, 157 of rank 64; with experts 15 of rank 16, "
        "3 of rank 64; 8 like 'wide'"
    )


def test_the_log_tells_at_start_how_many_like_the_largest_there_is_room_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_experts(tmp_path / "wide", 64)
    with caplog.at_level("INFO", "loramux.engine.build"):
        assemble_tiny(
            build("Qwen3MoeConfig"), max_loras=3, adapters={"wide": str(tmp_path / "wide")}
        )
    [block] = [message for message in caplog.messages if message.startswith("memory:")]
    assert "3 slots; room for" in block
    assert "3 like 'wide'" in block
