"""Which decoder layers may run as one, and that doing so changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loramux.model.stack import (
    alike_left_out,
    decoder_layers,
    join_runs,
    recorded_calls,
    runs_of,
)
from loramux.testing import tiny_model


class Layer(nn.Module):
    def __init__(self, number: int, width: int = 2) -> None:
        super().__init__()
        self.layer_idx = number
        self.weight = nn.Parameter(torch.ones(width))
        self.calls = 0

    def forward(self, hidden: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        self.calls += 1
        return hidden * 2 + self.layer_idx * scale


class Model(nn.Module):
    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def call(layers: nn.ModuleList, hidden: Tensor, how: str) -> Tensor:
    shared = torch.ones(1)
    for i, layer in enumerate(layers):
        if how == "alike":
            hidden = layer(hidden, 0.5, mask=shared)
        elif how == "two kinds":
            hidden = layer(hidden, mask=shared if i < 3 else None)
        elif how == "other numbers":
            hidden = layer(hidden, float(i % 2))
        elif how == "equal tensors":
            hidden = layer(hidden, mask=torch.ones(1))
        elif how == "something between":
            hidden = layer(hidden + 0)
        else:
            hidden = layer(hidden=hidden)
    return hidden


@pytest.mark.parametrize(
    ("how", "runs"),
    [
        ("alike", ((0, 1, 2), (3, 4, 5))),
        ("two kinds", ((0, 1, 2), (3, 4, 5))),
        ("other numbers", ((0,), (1,), (2,), (3,), (4,), (5,))),
        ("equal tensors", ((0,), (1,), (2,), (3,), (4,), (5,))),
        ("something between", ((0,), (1,), (2,), (3,), (4,), (5,))),
        ("by keyword", ((0,), (1,), (2,), (3,), (4,), (5,))),
    ],
)
def test_layers_run_as_one_if_their_calls_differ_in_nothing(
    how: str, runs: tuple[tuple[int, ...], ...]
) -> None:
    layers = nn.ModuleList(map(Layer, range(6)))
    with recorded_calls(list(layers)) as calls:
        wanted = call(layers, torch.ones(2), how)
    assert runs_of(calls) == runs
    originals = list(layers)
    joined = join_runs(layers, runs)
    assert len(joined) == len(runs)
    assert torch.equal(call(layers, torch.ones(2), how), wanted)
    assert [layer.calls for layer in originals] == [2] * 6


@pytest.mark.parametrize(
    ("num_layers", "lengths"),
    [(1, [1]), (2, [2]), (8, [4, 4]), (9, [3] * 3), (10, [2] * 5), (30, [3] * 10), (7, [4, 3])],
)
def test_alike_layers_are_cut_into_equal_runs_if_they_can(
    num_layers: int, lengths: list[int]
) -> None:
    layers = nn.ModuleList(map(Layer, range(num_layers)))
    with recorded_calls(list(layers)) as calls:
        call(layers, torch.ones(2), "alike")
    runs = runs_of(calls)
    assert [len(run) for run in runs] == lengths
    assert [layer for run in runs for layer in run] == list(range(num_layers))


@pytest.mark.parametrize(
    ("wide", "computed"),
    [(None, [1, 1, 1, 0, 0, 0, 0, 0, 0]), (4, [1, 1, 1, 1, 1, 1, 0, 0, 0])],
)
def test_of_alike_runs_the_first_computes_and_the_others_pass_on(
    wide: int | None, computed: list[int]
) -> None:
    model = Model(Layer(i, width=2 + (i == wide)) for i in range(9))
    runs = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    originals = list(model.layers)
    join_runs(model.layers, runs)
    joined = list(model.layers)
    with alike_left_out(model, runs):  # type: ignore[arg-type]
        call(model.layers, torch.ones(2), "alike")
    assert [layer.calls for layer in originals] == computed
    assert list(model.layers) == joined
    call(model.layers, torch.ones(2), "alike")
    assert [layer.calls for layer in originals] == [calls + 1 for calls in computed]


def test_layers_that_run_alone_are_not_left_out() -> None:
    model = Model(Layer(i) for i in range(3))
    with alike_left_out(model, [(0,), (1,), (2,)]):  # type: ignore[arg-type]
        call(model.layers, torch.ones(2), "alike")
    assert [layer.calls for layer in model.layers] == [1] * 3


def test_a_stand_in_has_the_attributes_of_its_layer() -> None:
    layers = nn.ModuleList(map(Layer, range(3)))
    join_runs(layers, [(0, 1, 2)])
    assert [layer.layer_idx for layer in layers] == [0, 1, 2]
    with pytest.raises(AttributeError, match="nothing"):
        _ = layers[1].nothing


def test_the_layers_of_a_model_are_found() -> None:
    model = tiny_model()
    found = decoder_layers(model)
    assert found is not None
    assert (found[0], found[1]) == (model.model, model.model.layers)
