"""What a compiled layer calls without looking inside: attention, and a linear with its LoRA delta.

An op of torch takes tensors and numbers, no Python objects, so it finds the backend that carries it
out by a number. The numbers are given here; a backend that nobody holds any more is forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor


class Attends(Protocol):
    """Carries out ``attend``."""

    def attend_group(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor: ...


class AddsLora(Protocol):
    """Carries out ``lora_beside`` and ``lora_in_place``."""

    def linear_beside(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]: ...

    def linear_in_place(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> Tensor: ...


class RunsExperts(Protocol):
    """Carries out ``run_experts``."""

    def run_experts(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        arena: Tensor,
        table: Tensor,
        token_slot: Tensor,
        token_count: Tensor,
        activation: str,
        *,
        lora: bool,
    ) -> Tensor: ...


class ChangesRows(Protocol):
    """Carries out ``own_rows`` and ``own_results``."""

    def change(self, place: int, y: Tensor, x: Tensor) -> None: ...

    def change_all(self, place: int, results: Sequence[Tensor], x: Tensor) -> None: ...


_numbers = itertools.count()
_attention: WeakValueDictionary[int, Attends] = WeakValueDictionary()
_lora: WeakValueDictionary[int, AddsLora] = WeakValueDictionary()
_experts: WeakValueDictionary[int, RunsExperts] = WeakValueDictionary()
_own: WeakValueDictionary[int, ChangesRows] = WeakValueDictionary()


def register_attention(backend: Attends) -> int:
    """The number by which ``attend`` finds a backend."""
    number = next(_numbers)
    _attention[number] = backend
    return number


def register_lora(ops: AddsLora) -> int:
    """The number by which the LoRA ops find theirs."""
    number = next(_numbers)
    _lora[number] = ops
    return number


def register_experts(experts: RunsExperts) -> int:
    """The number by which ``run_experts`` finds them."""
    number = next(_numbers)
    _experts[number] = experts
    return number


def register_own(parts: ChangesRows) -> int:
    """The number by which ``own_rows`` and ``own_results`` find them."""
    number = next(_numbers)
    _own[number] = parts
    return number


# The ops change more than they say: attention writes keys and values, LoRA uses a workspace.
# Nothing else in a compiled layer touches these, so no order is lost. Where the compiler sees the
# cache being written (by plain indexing, docs/performance.md), it copies all of it.
_LIBRARY = torch.library.Library("loramux", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, int backend, int group)"
    " -> Tensor"
)
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define(
    "lora_beside(Tensor x, Tensor weight, Tensor? bias, Tensor table, int[] sizes, int ops)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "lora_in_place(Tensor x, Tensor weight, Tensor? bias, Tensor table, int[] sizes, int ops)"
    " -> Tensor"
)
_LIBRARY.define(
    "run_experts(Tensor x, Tensor index, Tensor weights, Tensor gate_up, Tensor down, Tensor arena,"
    " Tensor table, Tensor token_slot, Tensor token_count, str activation, bool lora, int experts)"
    " -> Tensor"
)
_LIBRARY.define("own_results(Tensor[] results, Tensor x, Tensor place, int parts) -> Tensor[]")
_LIBRARY.define("top_k(Tensor x, int k) -> (Tensor, Tensor)")
_LIBRARY.define("own_rows(Tensor y, Tensor x, Tensor place, int parts) -> Tensor")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, backend: int, group: int
) -> Tensor:
    return _attention[backend].attend_group(group, q, k, v, keys, values)


def _attend_shape(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, backend: int, group: int
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _beside(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int], ops: int
) -> tuple[Tensor, Tensor]:
    return _lora[ops].linear_beside(x, weight, bias, table, sizes)


def _beside_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int], ops: int
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y)


def _in_place(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int], ops: int
) -> Tensor:
    return _lora[ops].linear_in_place(x, weight, bias, table, sizes)


def _in_place_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int], ops: int
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    arena: Tensor,
    table: Tensor,
    token_slot: Tensor,
    token_count: Tensor,
    activation: str,
    lora: bool,
    experts: int,
) -> Tensor:
    return _experts[experts].run_experts(
        x, index, weights, gate_up, down, arena, table, token_slot, token_count, activation,
        lora=lora,
    )  # fmt: skip


def _run_experts_shape(x: Tensor, *others: Tensor | str | bool | int) -> Tensor:
    return x.new_empty(x.shape)


def _own_results(results: list[Tensor], x: Tensor, place: Tensor, parts: int) -> list[Tensor]:
    changed = [result.clone() for result in results]
    _own[parts].change_all(int(place), changed, x)
    return changed


def _own_results_shape(results: list[Tensor], x: Tensor, place: Tensor, parts: int) -> list[Tensor]:
    return [torch.empty_like(result) for result in results]


def _own_rows(y: Tensor, x: Tensor, place: Tensor, parts: int) -> Tensor:
    changed = y.clone()
    _own[parts].change(int(place), changed, x)
    return changed


def _own_rows_shape(y: Tensor, x: Tensor, place: Tensor, parts: int) -> Tensor:
    return torch.empty_like(y)


def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    from loramux.ops.triton_top_k import top_k

    return top_k(x, k)


def _top_k_shape(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = x.new_empty(*x.shape[:-1], k)
    return values, torch.empty_like(values, dtype=torch.int64)


for _name, _run, _shape in (
    ("attend", _attend, _attend_shape),
    ("linear", _linear, _linear_shape),
    ("lora_beside", _beside, _beside_shape),
    ("lora_in_place", _in_place, _in_place_shape),
    ("run_experts", _run_experts, _run_experts_shape),
    ("own_rows", _own_rows, _own_rows_shape),
    ("own_results", _own_results, _own_results_shape),
    ("top_k", _top_k, _top_k_shape),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"loramux::{_name}", _shape, lib=_LIBRARY)

attend = torch.ops.loramux.attend.default
"""q ``[T, heads, dim]``, k and v ``[T, kv heads, dim]`` -> ``[T, heads, value dim]``."""
linear = torch.ops.loramux.linear.default
"""x ``[T, in]`` -> y ``[T, out]``, by the very call that the LoRA ops make for the base: what the
compiler makes of a product with a bias could differ in the last bit."""
lora_beside = torch.ops.loramux.lora_beside.default
"""x ``[T, in]`` -> the base's y ``[T, out]`` and the delta ``[T, out]`` to be added to it."""
lora_in_place = torch.ops.loramux.lora_in_place.default
"""x ``[T, in]`` -> y ``[T, out]`` with the delta in it."""
run_experts = torch.ops.loramux.run_experts.default
"""x ``[T, hidden]``, the router's experts and weights ``[T, k]`` -> ``[T, hidden]``; the rest as
``TritonExperts.run_experts`` has it."""
top_k = torch.ops.loramux.top_k.default
"""x ``[…, size]`` -> the k highest of each row and where they stand (int64), ``[…, k]``."""
own_results = torch.ops.loramux.own_results.default
"""``own_rows`` for a module that gives several tensors of T rows each."""
own_rows = torch.ops.loramux.own_rows.default
"""y and x ``[T, …]`` -> y with other values in the rows of adapters that have parts of their own.
``place``, an int64 on the CPU, says which modules it is about."""
