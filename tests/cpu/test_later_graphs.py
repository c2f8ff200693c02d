"""Graphs after the start: which are captured, and when."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from loramux.lora.layers import Form
from loramux.ops.attention import StepKind
from loramux.worker.graphs import GraphKey
from loramux.worker.later_graphs import PATIENCE, LaterGraphs


class Graphs:
    """Two buckets of steps that decode and one of mixed steps; notes what is captured."""

    def __init__(self, captured: Iterable[GraphKey] = ()) -> None:
        self.captured = [*captured]

    def keys(self, form: Form, rank_bucket: int, num_slots: int) -> list[GraphKey]:
        return [
            GraphKey(bucket, form, rank_bucket, few=True, kind=kind)
            for kind, bucket in ((StepKind.DECODE, 2), (StepKind.DECODE, 8), (StepKind.MIXED, 64))
        ]

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.captured

    def capture(self, key: GraphKey) -> None:
        assert key not in self.captured
        self.captured.append(key)

    @property
    def mixes(self) -> set[tuple[Form, int]]:
        return {(key.form, key.rank_bucket) for key in self.captured}


class Device:
    """Bytes of a GPU."""

    free = 4 * 2**30
    reserved = 2**30
    """By torch."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (found.free, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: found.reserved)
    return found


def later(graphs: Graphs) -> LaterGraphs:
    return LaterGraphs(graphs, num_slots=4)  # type: ignore[arg-type]


def use_all_time(later: LaterGraphs) -> None:
    while later.capture_next():
        pass


PLAIN, GAIN = False, True


@pytest.mark.parametrize(
    ("adapters", "mixes"),
    [
        ([], set()),
        ([(16, PLAIN)], set()),
        ([(64, PLAIN)], {(Form.BESIDE, 64)}),
        ([(16, GAIN)], {(Form.IN_PLACE, 16)}),
        # A step with both is of the larger rank, and in place.
        ([(16, GAIN), (64, PLAIN)], {(Form.BESIDE, 64), (Form.IN_PLACE, 16), (Form.IN_PLACE, 64)}),
        ([(64, GAIN), (16, PLAIN)], {(Form.IN_PLACE, 64)}),
        ([(64, GAIN), (16, GAIN)], {(Form.IN_PLACE, 16), (Form.IN_PLACE, 64)}),
        ([(16, PLAIN), (32, PLAIN), (32, GAIN)], {(Form.BESIDE, 32), (Form.IN_PLACE, 32)}),
    ],
)
def test_spare_time_makes_the_graphs_of_every_mix_that_there_can_be(
    adapters: list[tuple[int, bool]], mixes: set[tuple[Form, int]]
) -> None:
    at_start = Graphs().keys(Form.BESIDE, 16, 4)
    graphs = Graphs(at_start)
    found = later(graphs)
    for rank_bucket, has_gain in adapters:
        found.expect(rank_bucket, has_gain=has_gain)
    use_all_time(found)
    assert graphs.mixes == {(Form.BESIDE, 16)} | mixes
    assert len(graphs.captured) == 3 * len(graphs.mixes)


def test_what_steps_have_missed_comes_first_and_then_what_is_small() -> None:
    graphs = Graphs()
    found = later(graphs)
    found.expect(64, has_gain=False)
    two, eight, mixed = graphs.keys(Form.BESIDE, 64, 4)
    assert not found.is_there(mixed)
    use_all_time(found)
    assert graphs.captured == [mixed, two, eight]


def test_a_graph_that_steps_go_on_missing_is_captured_at_once() -> None:
    graphs = Graphs()
    found = later(graphs)
    key, other, _ = graphs.keys(Form.IN_PLACE, 64, 4)
    asked = [found.is_there(key) for _ in range(PATIENCE + 1)]
    assert asked == [False] * (PATIENCE - 1) + [True, True]
    assert graphs.captured == [key]
    assert not found.is_there(other)


def test_a_full_gpu_gets_no_more_graphs_and_says_so_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Graphs()
    found = later(graphs)
    found.expect(64, has_gain=False)
    device.free = 2**20
    key = graphs.keys(Form.BESIDE, 64, 4)[0]
    assert not any(found.is_there(key) for _ in range(3 * PATIENCE))
    use_all_time(found)
    assert graphs.captured == []
    assert len(caplog.records) == 1
    assert "--gpu-memory" in caplog.text
    device.free = 2**30
    assert found.is_there(key)


def test_graphs_leave_the_largest_step_its_memory(device: Device) -> None:
    """Torch keeps what a step has taken, so it is to be free only until such a step has come."""
    graphs = Graphs()
    found = LaterGraphs(graphs, num_slots=4, step_bytes=3 * 2**30)  # type: ignore[arg-type]
    capture, graph_bytes = graphs.capture, 300 * 2**20

    def take(key: GraphKey) -> None:
        capture(key)
        device.free -= graph_bytes
        device.reserved += graph_bytes

    graphs.capture = take  # type: ignore[method-assign]
    found.expect(64, has_gain=False)
    use_all_time(found)
    assert len(graphs.captured) == 2, "a third one would have left less"
    device.free -= 3 * 2**30
    device.reserved += 3 * 2**30
    use_all_time(found)
    assert len(graphs.captured) == 2, "that is still as much as before"
    device.free += graph_bytes
    use_all_time(found)
    assert len(graphs.captured) == 3
