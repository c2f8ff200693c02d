"""Goes through the launches of modules, so that their kernels are compiled before any step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator
from functools import partial

from torch import nn

from loramux.lora.ends import AdaptedHead
from loramux.lora.experts import GroupedExperts
from loramux.lora.layers import LoraLinear
from loramux.model.load import BaseModel
from loramux.ops.expert_tiles import Mixture
from loramux.ops.interface import CompiledOps
from loramux.worker.graphs import first_of_each

Kinds = tuple[type[nn.Module], ...]


def rehearse_kernels(
    base: BaseModel,
    ops: CompiledOps,
    *,
    max_rows: int,
    mixtures: Collection[Mixture] = (),
    kinds: Kinds = (LoraLinear, AdaptedHead, GroupedExperts),
) -> None:
    """Launch whatever modules of these kinds can, in steps of up to ``max_rows`` rows.

    ``mixtures``: of the layers with experts.
    """
    modules = [*_distinct(base.model, kinds)]
    for rank_bucket, few in itertools.product(ops.rank_buckets, (True, False)):
        ops.begin_step(rank_bucket, few=few)
        kernels = partial(ops.kernels_of, rank_bucket=rank_bucket, few=few, dtype=base.dtype)
        for module in modules:
            if isinstance(module, GroupedExperts):
                [mixture] = (m for m in mixtures if m.num_experts == len(module.down))
                sizes = partial(kernels, mixtures=(mixture,))
                for rows in first_of_each(sizes, 1, max_rows):
                    module.rehearse(rows, mixture.top_k)
            else:
                assert isinstance(module, LoraLinear | AdaptedHead)
                for rows in first_of_each(kernels, 1, max_rows):
                    module.rehearse(rows, few=few)


def _distinct(model: nn.Module, kinds: Kinds) -> Iterator[nn.Module]:
    """One module of all that launch the same."""
    seen: set[Hashable] = set()
    for module in model.modules():
        if isinstance(module, kinds) and (alike := _launched_by(module)) not in seen:
            seen.add(alike)
            yield module


def _launched_by(module: nn.Module) -> Hashable:
    if isinstance(module, GroupedExperts):
        return module.gate_up.shape, module.down.shape, module.activation
    assert isinstance(module, LoraLinear | AdaptedHead)
    site = module.site
    return site.in_features, *(part.size for part in site.slices), site.bias is None
