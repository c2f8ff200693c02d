"""A loaded adapter linear by linear, whatever its files had in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.spec import BaseLayout, ModuleDelta


@dataclass(frozen=True)
class PlainModule:
    """``scale * B A`` on one linear, with a magnitude where there is DoRA."""

    name: str
    """As the base calls it, or as others do what is a part of a fused linear here."""
    is_part: bool
    rank: int
    scale: float
    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def plain_modules(loaded: LoadedAdapter, base: BaseLayout) -> list[PlainModule]:
    """In the order of the base's modules; rows stand as the base has them."""
    return [_plain(delta, loaded, base) for delta in loaded.spec.deltas]


def _plain(delta: ModuleDelta, loaded: LoadedAdapter, base: BaseLayout) -> PlainModule:
    tensors = loaded.tensors
    magnitude = None
    if delta.magnitude is not None:
        magnitude = torch.cat(delta.pick(tensors[delta.magnitude]))
    return PlainModule(
        name=_name(delta, base),
        is_part=delta.rows is not None,
        rank=delta.rank,
        scale=delta.scale,
        a=tensors[delta.a],
        b=torch.cat(delta.pick(tensors[delta.b])),
        magnitude=magnitude,
    )


def _name(delta: ModuleDelta, base: BaseLayout) -> str:
    if delta.rows is None:
        return delta.module
    return next(name for name, rows in _parts(delta.module, base) if rows == delta.rows)


def _parts(module: str, base: BaseLayout) -> Iterator[tuple[str, range]]:
    for fusion in base.fusions:
        if fusion.fused == module:
            yield from zip(fusion.parts, fusion.rows, strict=True)
