"""Values of the adapter's own for parameters of the base, as they stand in its block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleDelta, ModuleShape
from loramux.ops.layout import pad

Kind = Literal["weight", "bias", "shift"]

BaseParameter = Callable[[str, str], Tensor]
"""Module and ``weight`` or ``bias`` -> the base's values, as the module holds them."""


@dataclass(frozen=True)
class OwnTensor:
    """What an adapter has of its own for one module, and where it stands in a block."""

    module: str
    kind: Kind
    """``weight`` and ``bias`` take the place of the base's. ``shift`` is added to what a linear
    gives, outside DoRA's gain."""
    start: int
    """First element in the block."""
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    """The rows of the base's that these are, ascending; None: all."""

    def view(self, block: Tensor) -> Tensor:
        """The values, in a block or in the part of the arena that holds it."""
        return block[self.start : self.start + prod(self.shape)].view(self.shape)


@dataclass(frozen=True)
class OwnValues:
    """The values themselves, before they have a place."""

    module: str
    kind: Kind
    values: Tensor
    rows: tuple[int, ...] | None = None


def own_values(
    spec: LoraSpec,
    tensors: Mapping[str, Tensor],
    linears: Mapping[str, ModuleShape],
    dtype: torch.dtype,
    base_parameter: BaseParameter,
) -> list[OwnValues]:
    """All that an adapter has beside A, B and g, in ``dtype``.

    Biases of linears become differences from the base's, so that they can be added to a row that
    has the base's already; not so that of a head with more tokens, which is the adapter's as a
    whole. What equals the base's values is left out.
    """
    found: list[OwnValues] = []
    shifts: dict[str, Tensor] = {}
    wholes = {
        r.module: tensors[r.tensor]
        for r in spec.replacements
        if r.parameter == "weight" and r.rows is None
    }
    for delta in spec.deltas:
        if delta.b_bias is not None:
            part = torch.cat(delta.pick(tensors[delta.b_bias])).float() * delta.scale
            _shift(shifts, delta.module, linears, part, delta.rows)
    for replacement in spec.replacements:
        module, parameter, own = replacement.module, replacement.parameter, replacement.tensor
        base = base_parameter(module, parameter)
        grown = tensors[own].dim() == 1 and tensors[own].shape != base.shape
        if parameter == "bias" and module in linears and not grown:
            difference = tensors[own].float() - base.float().cpu()
            _shift(shifts, module, linears, difference, None)
            continue
        values, rows = tensors[own].to(dtype), replacement.rows
        if rows is not None:
            order = sorted(range(len(rows)), key=rows.__getitem__)
            rows, values = tuple(rows[i] for i in order), values[order]
            # Single rows may stand on a whole weight of the adapter's own.
            whole = wholes.get(module, base)
            there = whole[torch.tensor(rows, device=whole.device)].to(dtype)
        else:
            there = base
        if values.shape != there.shape or not torch.equal(values.to(there.device), there):
            kind: Kind = "bias" if parameter == "bias" else "weight"
            found.append(OwnValues(module, kind, values, rows))
    for module, deltas in spec.by_module().items():
        if module not in linears:
            merged = _merged(base_parameter(module, "weight"), deltas, tensors)
            found.append(OwnValues(module, "weight", merged.to(dtype)))
    moved = (OwnValues(module, "shift", shift.to(dtype)) for module, shift in shifts.items())
    return found + [own for own in moved if own.values.any()]


def _merged(weight: Tensor, deltas: Sequence[ModuleDelta], tensors: Mapping[str, Tensor]) -> Tensor:
    """``W + scale B A`` of a router, in float32: PEFT changes its weight, too, not its result."""
    merged = weight.float().cpu().clone()
    for delta in deltas:
        b = torch.cat(delta.pick(tensors[delta.b])).float() * delta.scale
        merged += b @ tensors[delta.a].float()
    return merged


def own_elements(spec: LoraSpec, layout: BaseLayout) -> int:
    """Elements that ``own_values`` take up at most, as told before any value is read."""
    shifted = {delta.module for delta in spec.deltas if delta.b_bias is not None}
    total = 0
    for r in spec.replacements:
        shape = layout.replaceable[r.module][r.parameter]
        grown = spec.vocab_size is not None and r.module in (layout.embedding, layout.head)
        if grown:
            shape = (spec.vocab_size or 0, *shape[1:])
        if r.parameter == "bias" and r.module in layout.modules and not grown:
            shifted.add(r.module)
        else:
            total += pad(prod(shape if r.rows is None else (len(r.rows), *shape[1:])))
    merged = (layout.routers[m] for m in spec.by_module() if m not in layout.modules)
    total += sum(pad(shape.in_features * shape.out_features) for shape in merged)
    return total + sum(pad(layout.modules[module].out_features) for module in shifted)


def _shift(
    shifts: dict[str, Tensor],
    module: str,
    linears: Mapping[str, ModuleShape],
    part: Tensor,
    rows: range | None,
) -> None:
    """Add to some rows of what a module's result is shifted by."""
    if module not in shifts:
        shifts[module] = torch.zeros(linears[module].out_features)
    where = slice(None) if rows is None else slice(rows.start, rows.stop)
    shifts[module][where] += part
