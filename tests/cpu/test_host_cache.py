"""More adapters than host memory may hold: read again when they are needed, and never kept."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest

from loramux import LLM, SamplingParams
from loramux.config import AdapterOptions
from loramux.errors import ConfigError
from loramux.testing import random_adapter, tiny_model
from loramux.types import RequestOutput
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS

NAMES = [f"x{i}" for i in range(6)]
PROMPT = [5, 77, 31, 9]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    layout = assemble_tiny(tiny_model()).worker.layout
    return {
        name: str(random_adapter(folder / name, layout, rank=4, targets=TARGETS, seed=seed))
        for seed, name in enumerate(NAMES)
    }


def engine(adapters: dict[str, str], *, copies: int | None = None, slots: int = 2) -> LLM:
    """``copies``: how many adapters fit into host memory and into the arena; None: all."""
    if copies is None:
        return LLM.over(assemble_tiny(tiny_model(), max_loras=slots), adapters)
    one = next(iter(adapters))
    size = LLM.over(assemble_tiny(tiny_model()), {one: adapters[one]}).adapters()[0].num_bytes
    parts = assemble_tiny(
        tiny_model(),
        max_loras=slots,
        device_cache=str(min(copies, slots) * size),
        host_cache=str(copies * size),
    )
    return LLM.over(parts, adapters)


def ask(llm: LLM, names: Sequence[str | None]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return llm.generate([PROMPT] * len(names), params, adapter=list(names))


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_answers_do_not_hang_on_how_many_copies_there_can_be(
    adapters: dict[str, str], copies: int
) -> None:
    names = [None, *NAMES, *reversed(NAMES), "x2", None]
    expected = tokens(ask(engine(adapters), names))
    llm = engine(adapters, copies=copies)
    assert tokens(ask(llm, names)) == expected
    assert llm.stats().host_evictions > 0
    assert llm.stats().host_adapters <= copies


def test_what_is_loaded_last_has_its_copy(adapters: dict[str, str]) -> None:
    llm = engine(adapters, copies=2)
    assert [info.name for info in llm.adapters() if info.in_host_memory] == ["x4", "x5"]
    ask(llm, ["x0"])
    assert [info.name for info in llm.adapters() if info.in_host_memory] == ["x0", "x5"]


def test_a_request_whose_source_is_gone_ends_alone(
    adapters: dict[str, str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.symlink_to(adapters["x0"])
    llm = engine({"gone": str(gone), "x1": adapters["x1"], "x2": adapters["x2"]}, copies=1)
    gone.unlink()
    outputs = ask(llm, ["x1", "gone", None, "x2"])
    reasons = [output.completions[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length", "length"]
    gone.symlink_to(adapters["x0"])
    assert ask(llm, ["gone"])[0].completions[0].finish_reason == "length"


def test_a_host_cache_below_the_device_cache_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="is below the device cache"):
        assemble_tiny(tiny_model(), device_cache="2MiB", host_cache="1MiB")


def test_fewer_copies_than_slots_are_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="is below max_loras"):
        AdapterOptions(max_loras=8, max_cpu_loras=4)


def test_memory_is_flat_while_a_thousand_adapters_come_and_go(adapters: dict[str, str]) -> None:
    llm = engine({})

    def come_and_go(times: int) -> None:
        for i in range(times):
            llm.load_adapter(f"tenant-{i}", adapters[NAMES[i % len(NAMES)]])
            if i % 10 == 0:
                ask(llm, [f"tenant-{i}"])
            llm.unload_adapter(f"tenant-{i}")

    come_and_go(100)
    before = resident_bytes()
    come_and_go(1000)
    # Each has some 40 kB of weights: a hundredth of what a leak would be is noise.
    assert resident_bytes() - before < 4_000_000
    assert llm.stats().host_bytes == 0


def resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024
