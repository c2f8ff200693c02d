"""Replaces the linears of a loaded model by LoRA-capable ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from loramux.adapters.experts import PARTS, expert_part
from loramux.lora.ends import AdaptedEmbedding, AdaptedHead, AdaptedNorm
from loramux.lora.experts import AdaptedExperts, AdaptedRouter, GroupedExperts
from loramux.lora.layers import CompiledLoraLinear, LoraContext, LoraLinear
from loramux.lora.own import Member
from loramux.model.anatomy import Anatomy, embedding_scale, linear_weight
from loramux.model.experts import activation_of, adapt, use_adapted_experts
from loramux.model.fusion import FirstMember, OtherMember, fuse, lay_out_for_cpu
from loramux.ops.interface import Site, Slice


def insert_sites(model: nn.Module, anatomy: Anatomy, context: LoraContext) -> list[nn.Module]:
    """Put what can take LoRA at every site; returns what the base has there, in table order: its
    linears, then embedding and head. Experts, which come after them, stay where they are."""
    names = anatomy.modules.names
    there = names[: len(anatomy.layer_shapes) + anatomy.num_ends]
    originals = [model.get_submodule(name) for name in there]
    for members in anatomy.sites:
        linears = [originals[module] for module in members]
        if len(members) > 1:
            linear = fuse(cast(list[nn.Linear], linears))
        else:
            [linear] = linears
            if type(linear) is nn.Linear:
                lay_out_for_cpu(linear)
        site = _site(anatomy, members, cast(Tensor | None, linear.bias))
        place = context.own.add_place(
            *(
                Member(names[p.module], originals[p.module], slice(p.start, p.start + p.size))
                for p in site.slices
            )
        )
        wrapped = (
            LoraLinear(linear, site, context, place)
            if context.opaque_ops is None
            else CompiledLoraLinear(linear, linear_weight(linear), site, context, place)
        )
        if len(members) == 1:
            _replace(model, names[members[0]], wrapped)
            continue
        others = [OtherMember() for _ in members[1:]]
        sizes = [part.size for part in site.slices]
        for module, stand_in in zip(
            members, [FirstMember(wrapped, sizes, others), *others], strict=True
        ):
            _replace(model, names[module], stand_in)
    _insert_ends(model, anatomy, context)
    _insert_experts(model, anatomy, context)
    return originals


def _insert_ends(model: nn.Module, anatomy: Anatomy, context: LoraContext) -> None:
    """Norms, embedding and head that adapters may change."""
    for name, tokens_at in anatomy.norms.items():
        norm = model.get_submodule(name)
        place = context.own.add_place(Member(name, norm))
        _replace(model, name, AdaptedNorm(norm, context, place, tokens_at))
    rows = anatomy.modules.index
    if (name := anatomy.layout.embedding) is not None:
        embedding = cast(nn.Embedding, model.get_submodule(name))
        part = Slice(rows[name], 0, embedding.embedding_dim)
        scale = embedding_scale(embedding)
        _replace(model, name, AdaptedEmbedding(embedding, name, part, context, scale))
    if (name := anatomy.layout.head) is not None:
        head = model.get_submodule(name)
        _replace(model, name, AdaptedHead(head, name, rows[name], context))


def _insert_experts(model: nn.Module, anatomy: Anatomy, context: LoraContext) -> None:
    rows = anatomy.modules.index
    for name in anatomy.layout.experts:
        experts = model.get_submodule(name)
        first = rows[expert_part(name, 0, PARTS[0])]
        if context.ops.experts is None:
            adapt(experts, AdaptedExperts(experts, first, context))
        else:
            activation = activation_of(experts)
            assert activation is not None, "the examination leaves out what the kernels lack"
            adapt(experts, GroupedExperts(experts, first, context, activation))
    for name in anatomy.layout.routers:
        router = model.get_submodule(name)
        place = context.own.add_place(Member(name, router))
        _replace(model, name, AdaptedRouter(router, context, place))
    if anatomy.layout.experts:
        use_adapted_experts(cast(PreTrainedModel, model))


def _site(anatomy: Anatomy, members: Sequence[int], bias: Tensor | None) -> Site:
    slices: list[Slice] = []
    start = 0
    for module in members:
        size = anatomy.modules.shapes[module].out_features
        slices.append(Slice(module, start, size))
        start += size
    return Site(tuple(slices), anatomy.modules.shapes[members[0]].in_features, bias)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
