"""An adapter as one block: where everything stands, in which form, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loramux.adapters.spec import LoraSpec, ModuleDelta, ModuleShape
from loramux.lora.placements import Placement
from loramux.lora.weights import (
    HostCopy,
    ModuleTable,
    block_bytes,
    dora_gain,
    pack,
    plain_placements,
)
from loramux.ops.layout import ALIGN_BYTES, NO_GAIN, pad
from tests.cpu.placed import each_of

SHAPES = {"q": ModuleShape(53, 41), "k": ModuleShape(64, 8), "v": ModuleShape(1, 3)}
MODULES = ModuleTable(tuple(SHAPES), tuple(SHAPES.values()))
RANKS = {"q": 3, "k": 8, "v": 17}
SCALE = 2.75

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def delta(module: str, *, scale: float = SCALE, dora: bool = False) -> ModuleDelta:
    magnitude = f"{module}.m" if dora else None
    return ModuleDelta(module, RANKS[module], scale, f"{module}.a", f"{module}.b", magnitude)


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module, shape in SHAPES.items():
        rank = RANKS[module]
        tensors[f"{module}.a"] = torch.randn(rank, shape.in_features, generator=generator)
        tensors[f"{module}.b"] = torch.randn(shape.out_features, rank, generator=generator)
        tensors[f"{module}.m"] = torch.rand(shape.out_features, generator=generator) + 0.5
    return {key: tensor.to(dtype) for key, tensor in tensors.items()}


def base_weight(module: int) -> Tensor:
    shape = MODULES.shapes[module]
    generator = torch.Generator().manual_seed(10 + module)
    return torch.randn(shape.out_features, shape.in_features, generator=generator)


def packed(*deltas: ModuleDelta, dtype: torch.dtype = torch.float32) -> HostCopy:
    return pack(LoraSpec(deltas), random_tensors(), MODULES, dtype, base_weight)


def parts(copy: HostCopy, place: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """A, B and g of a module with their padding, read as ``ops/layout.py`` says."""
    unit = ALIGN_BYTES // copy.block.whole.element_size()
    shape = MODULES.shapes[place.module]

    def matrix(offset: int, rows: int, columns: int) -> Tensor:
        start = offset * unit
        return copy.block.whole[start : start + rows * columns].view(rows, columns)

    a = matrix(place.offset_a, place.rank, pad(shape.in_features))
    b = matrix(place.offset_b, shape.out_features, pad(place.rank))
    g = matrix(place.offset_g, 1, pad(shape.out_features))[0]
    return a, b, g


@DTYPES
def test_a_stands_in_the_block_as_it_is(dtype: torch.dtype) -> None:
    copy = packed(delta("q"), delta("k"), delta("v"), dtype=dtype)
    for place in each_of(copy.placements):
        name, shape = MODULES.names[place.module], MODULES.shapes[place.module]
        a, _, _ = parts(copy, place)
        assert torch.equal(a[:, : shape.in_features], random_tensors()[f"{name}.a"].to(dtype))


@DTYPES
def test_b_holds_the_scale_multiplied_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    tensors = random_tensors(torch.bfloat16)
    copy = pack(LoraSpec((delta("q"),)), tensors, MODULES, dtype, base_weight)
    _, b, _ = parts(copy, each_of(copy.placements)[0])
    assert torch.equal(b[:, : RANKS["q"]], (tensors["q.b"].float() * SCALE).to(dtype))


@DTYPES
def test_padding_is_zero(dtype: torch.dtype) -> None:
    copy = packed(delta("q", dora=True), delta("k", dora=True), delta("v", dora=True), dtype=dtype)
    for place in each_of(copy.placements):
        shape = MODULES.shapes[place.module]
        a, b, g = parts(copy, place)
        assert not a[:, shape.in_features :].any()
        assert not b[:, place.rank :].any()
        assert not g[shape.out_features :].any()


@DTYPES
@pytest.mark.parametrize("dora", [False, True])
def test_parts_fill_the_block_without_gap_or_overlap(dtype: torch.dtype, dora: bool) -> None:
    copy = packed(delta("v", dora=dora), delta("q"), delta("k", dora=dora), dtype=dtype)
    unit = ALIGN_BYTES // dtype.itemsize
    spans = []
    for place in each_of(copy.placements):
        a, b, g = parts(copy, place)
        spans += [(place.offset_a, a.numel()), (place.offset_b, b.numel())]
        spans += [(place.offset_g, g.numel())] if place.offset_g != NO_GAIN else []
    end = 0
    for offset, size in sorted(spans):
        assert offset * unit == end
        end += size
    assert end == copy.block.whole.numel()


def test_every_part_starts_at_a_multiple_of_sixteen_bytes() -> None:
    copy = packed(delta("q", dora=True), delta("v", dora=True), dtype=torch.bfloat16)
    for place in each_of(copy.placements):
        for part in parts(copy, place):
            assert (part.data_ptr() - copy.block.whole.data_ptr()) % 16 == 0


def test_order_of_deltas_does_not_matter() -> None:
    one, other = packed(delta("q"), delta("v")), packed(delta("v"), delta("q"))
    assert each_of(one.placements) == each_of(other.placements)
    assert torch.equal(one.block.whole, other.block.whole)


def test_gain_is_magnitude_by_the_norm_of_the_rows_of_the_adapted_weight() -> None:
    copy = packed(delta("q", dora=True))
    tensors = {key: tensor.double() for key, tensor in random_tensors().items()}
    adapted = base_weight(0).double() + SCALE * tensors["q.b"] @ tensors["q.a"]
    wanted = tensors["q.m"] / adapted.square().sum(dim=1).sqrt()
    _, _, g = parts(copy, each_of(copy.placements)[0])
    torch.testing.assert_close(g[:41].double(), wanted, rtol=1e-5, atol=0)


def test_gain_of_a_half_precision_base_is_computed_in_float32() -> None:
    tensors = random_tensors(torch.bfloat16)
    weight = base_weight(0).to(torch.bfloat16)
    gain = dora_gain(weight, tensors["q.a"].float(), tensors["q.b"].float(), tensors["q.m"])
    adapted = weight.double() + tensors["q.b"].double() @ tensors["q.a"].double()
    assert gain.dtype == torch.float32
    torch.testing.assert_close(gain.double(), tensors["q.m"].double() / adapted.norm(dim=1))


def test_base_weight_is_read_only_for_modules_with_gain() -> None:
    read = []

    def record(module: int) -> Tensor:
        read.append(module)
        return base_weight(module)

    spec = LoraSpec((delta("q"), delta("k", dora=True), delta("v")))
    pack(spec, random_tensors(), MODULES, torch.float32, record)
    assert read == [1]


@DTYPES
def test_block_bytes_foretells_the_size_of_a_plain_adapter(dtype: torch.dtype) -> None:
    deltas = [ModuleDelta(m, 12, 1.0, f"{m}.a", f"{m}.b") for m in SHAPES]
    tensors = {d.a: torch.ones(12, SHAPES[d.module].in_features) for d in deltas}
    tensors |= {d.b: torch.ones(SHAPES[d.module].out_features, 12) for d in deltas}
    copy = pack(LoraSpec(tuple(deltas)), tensors, MODULES, dtype, base_weight)
    assert copy.num_bytes == block_bytes(MODULES.shapes, 12, dtype)
    foretold = plain_placements(dict(enumerate(MODULES.shapes)), 12, dtype)
    assert each_of(copy.placements) == each_of(foretold)
    assert copy.max_rank == 12


# Deltas on some rows -----------------------------------------------------------------------------


def of_rows(key: str, rows: range, *, rank: int, scale: float, dora: bool = False) -> ModuleDelta:
    magnitude = f"{key}.m" if dora else None
    return ModuleDelta("k", rank, scale, f"{key}.a", f"{key}.b", magnitude, rows=rows)


def of_rows_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for key, rank, size in (("x", 3, 5), ("y", 2, 2)):
        tensors[f"{key}.a"] = torch.randn(rank, 64, generator=generator)
        tensors[f"{key}.b"] = torch.randn(size, rank, generator=generator)
        tensors[f"{key}.m"] = torch.rand(size, generator=generator) + 0.5
    return tensors


def test_deltas_on_rows_of_one_module_are_stacked() -> None:
    tensors = of_rows_tensors()
    deltas = (
        of_rows("x", range(5), rank=3, scale=2.0),
        of_rows("y", range(6, 8), rank=2, scale=-0.5),
    )
    copy = pack(LoraSpec(deltas), tensors, MODULES, torch.float32, base_weight)
    (place,) = each_of(copy.placements)
    a, b, _ = parts(copy, place)
    expected = torch.zeros(8, 8)
    expected[:5, :3] = 2.0 * tensors["x.b"]
    expected[6:, 3:5] = -0.5 * tensors["y.b"]
    assert (place.rank, copy.max_rank, place.offset_g) == (5, 5, NO_GAIN)
    assert torch.equal(a, torch.cat([tensors["x.a"], tensors["y.a"]]))
    assert torch.equal(b, expected)


def test_rows_without_a_magnitude_have_the_gain_one() -> None:
    tensors = of_rows_tensors()
    deltas = (
        of_rows("x", range(5), rank=3, scale=2.0, dora=True),
        of_rows("y", range(6, 8), rank=2, scale=-0.5),
    )
    copy = pack(LoraSpec(deltas), tensors, MODULES, torch.float32, base_weight)
    _, _, g = parts(copy, each_of(copy.placements)[0])
    adapted = base_weight(1)[:5].double() + 2.0 * tensors["x.b"].double() @ tensors["x.a"].double()
    torch.testing.assert_close(g[:5].double(), tensors["x.m"].double() / adapted.norm(dim=1))
    assert g[5:].tolist() == [1.0, 1.0, 1.0]


def test_stored_rows_are_taken_in_their_order() -> None:
    tensors = random_tensors()
    swapped = ModuleDelta("k", 8, SCALE, "k.a", "k.b", "k.m", stored_rows=(range(4, 8), range(4)))
    copy = pack(LoraSpec((swapped,)), tensors, MODULES, torch.float32, base_weight)
    rolled = {key: t if key == "k.a" else t.roll(4, 0) for key, t in tensors.items()}
    expected = pack(LoraSpec((delta("k", dora=True),)), rolled, MODULES, torch.float32, base_weight)
    assert torch.equal(copy.block.whole, expected.block.whole)


def test_one_b_can_feed_several_modules() -> None:
    tensors = random_tensors()
    tensors["k.b"] = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
    cut = [ModuleDelta("k", 8, SCALE, "k.a", "k.b", stored_rows=(range(i, i + 8),)) for i in (0, 8)]
    for i, found in enumerate(cut):
        copy = pack(LoraSpec((found,)), tensors, MODULES, torch.float32, base_weight)
        _, b, _ = parts(copy, each_of(copy.placements)[0])
        assert torch.equal(b, SCALE * tensors["k.b"][8 * i : 8 * i + 8])
