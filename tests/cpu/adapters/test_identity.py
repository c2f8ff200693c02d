from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loramux.adapters.identity import adapter_id
from loramux.adapters.spec import LoraSpec, ModuleDelta, Replacement
from loramux.types import AdapterId


def spec() -> LoraSpec:
    return LoraSpec(
        (ModuleDelta("q", 2, 0.5, "q.a", "q.b"), ModuleDelta("v", 2, 0.5, "v.a", "v.b", "v.m"))
    )


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q.a": (2, 4), "q.b": (6, 2), "v.a": (2, 4), "v.b": (4, 2), "v.m": (4,)}
    return {key: torch.randn(shape) for key, shape in shapes.items()}


def changed(**change: object) -> AdapterId:
    """Id with a change to the delta on ``v``."""
    q, v = spec().deltas
    return adapter_id(LoraSpec((q, replace(v, **change))), tensors())  # type: ignore[arg-type]


def test_id_is_a_hexadecimal_digest_that_does_not_vary():
    assert adapter_id(spec(), tensors()) == adapter_id(spec(), tensors())
    assert len(bytes.fromhex(adapter_id(spec(), tensors()))) == 32


def test_order_of_deltas_and_tensors_does_not_count():
    shuffled = LoraSpec(spec().deltas[::-1])
    assert adapter_id(shuffled, dict(reversed(tensors().items()))) == adapter_id(spec(), tensors())


def test_spelling_of_keys_does_not_count():
    q, v = spec().deltas
    renamed = LoraSpec(
        (
            replace(q, a="x" + q.a, b="x" + q.b),
            replace(v, a="x" + v.a, b="x" + v.b, magnitude="xv.m"),
        )
    )
    found = {"x" + key: value for key, value in tensors().items()}
    assert adapter_id(renamed, found) == adapter_id(spec(), tensors())


def test_warnings_do_not_count():
    assert adapter_id(replace(spec(), warnings=("odd",)), tensors()) == adapter_id(
        spec(), tensors()
    )


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.25},
        {"scale": -0.5},
        {"module": "k"},
        {"rows": range(4)},
        {"stored_rows": (range(2, 4), range(2))},
        {"stored_rows": (range(2),)},
    ],
)
def test_other_effect_is_another_id(change: dict[str, object]):
    assert changed(**change) != adapter_id(spec(), tensors())


@pytest.mark.parametrize("key", ["q.a", "q.b", "v.a", "v.b", "v.m"])
def test_every_value_counts(key: str):
    other = tensors()
    other[key].flatten()[-1] += 1
    assert adapter_id(spec(), other) != adapter_id(spec(), tensors())


def test_dtype_counts():
    other = {key: value.half() for key, value in tensors().items()}
    same = {key: value.half().float() for key, value in tensors().items()}
    assert adapter_id(spec(), other) != adapter_id(spec(), same)


def test_swapped_modules_are_another_id():
    q, v = LoraSpec(
        (ModuleDelta("q", 2, 0.5, "q.a", "q.b"), ModuleDelta("v", 2, 0.5, "v.a", "v.b"))
    ).deltas
    swapped = LoraSpec((replace(q, module="v"), replace(v, module="q")))
    assert adapter_id(swapped, tensors()) != adapter_id(LoraSpec((q, v)), tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_every_stored_dtype_has_an_id(dtype: torch.dtype):
    assert adapter_id(spec(), {key: value.to(dtype) for key, value in tensors().items()})


def test_layout_in_memory_does_not_count():
    other = {
        key: value.mT.contiguous().mT if value.ndim == 2 else value
        for key, value in tensors().items()
    }
    assert adapter_id(spec(), other) == adapter_id(spec(), tensors())


def test_other_rows_of_the_module_are_another_id():
    (_, v) = spec().deltas
    ids = {
        adapter_id(LoraSpec((replace(v, rows=rows),)), tensors())
        for rows in (None, range(4), range(4, 8), range(8, 12))
    }
    assert len(ids) == 4


def test_order_of_deltas_on_rows_of_one_module_does_not_count():
    q, v = spec().deltas
    deltas = (replace(q, rows=range(6)), replace(v, module="q", rows=range(6, 10)))
    assert adapter_id(LoraSpec(deltas), tensors()) == adapter_id(LoraSpec(deltas[::-1]), tensors())


def test_fused_weights_have_the_id_of_the_same_weights_cut():
    found = tensors()
    fused = LoraSpec(
        tuple(
            ModuleDelta(name, 2, 0.5, "q.a", "q.b", stored_rows=(rows,))
            for name, rows in (("k", range(4)), ("v", range(4, 6)))
        )
    )
    cut = LoraSpec((ModuleDelta("k", 2, 0.5, "q.a", "k.b"), ModuleDelta("v", 2, 0.5, "q.a", "v.b")))
    other = {**found, "k.b": found["q.b"][:4], "v.b": found["q.b"][4:]}
    assert adapter_id(fused, found) == adapter_id(cut, other)


def test_values_of_its_own_and_biases_of_b_are_part_of_an_adapter():
    plain = spec()
    own = replace(plain, replacements=(Replacement("norm", "weight", "q.a"),))
    rows = replace(plain, replacements=(Replacement("norm", "weight", "q.a", (1, 2)),))
    elsewhere = replace(plain, replacements=(Replacement("norm", "bias", "q.a"),))
    shifted = replace(plain, deltas=(replace(plain.deltas[0], b_bias="q.b"), *plain.deltas[1:]))
    specs = (plain, own, rows, elsewhere, shifted)
    assert len({adapter_id(s, tensors()) for s in specs}) == len(specs)
