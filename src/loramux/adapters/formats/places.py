"""What a module's name in an adapter means on one base, though it be fused there or split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from loramux.adapters.experts import parts_in
from loramux.adapters.formats.module_names import ModuleNames
from loramux.adapters.fusions import GATE_UP
from loramux.adapters.spec import BaseLayout, Fusion, ModuleShape

_ATTENTION_IN_ONE = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "wqkv", "qkv")
"""Some of these hold the heads interleaved, or q, k and v in pieces: never cut on a guess."""

WRAPPED = ".base_layer"
"""What PEFT adds to a module's name for each parameter but the last that it wraps it for."""

_PARTS_OF_ATTENTION = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """Rows of a module of the base, and the rows of B that go there (see ModuleDelta)."""

    module: str
    rows: range | None = None
    stored_rows: tuple[range, ...] = ()

    def overlaps(self, other: Target) -> bool:
        """Whether both change some row of one module."""
        if self.module != other.module:
            return False
        if self.rows is None or other.rows is None:
            return True
        return self.rows.start < other.rows.stop and other.rows.start < self.rows.stop


@dataclass(frozen=True, slots=True)
class Place:
    """Where the weights of one name go. ``shape`` is that of the linear they were made for."""

    shape: ModuleShape
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class ExpertsPlace:
    """Where tensors with the LoRA of all experts of a layer go."""

    experts: str
    """The base's module of all experts."""
    parts: tuple[str, ...] = ()
    """The projections that the name means; none: a parameter that the shapes tell."""


class Places:
    """The modules of a base by the names that adapters use, fused or split.

    ``up_first``: whether a gate_up_proj in the file holds the rows of up before those of gate;
    None: as the family does.
    """

    def __init__(self, base: BaseLayout, *, up_first: bool | None = None) -> None:
        self._base = base
        self._up_first = up_first
        # A base may have tens of thousands of modules that are simply themselves (of experts).
        self._places: dict[str, Place] = {}
        """Of all other names."""
        self._reasons: dict[str, str] = {}
        for fusion in base.fusions:
            if fusion.fused in base.modules:
                self._add_to_fused_base(fusion)
            else:
                self._add_to_split_base(fusion)
        for name, shape in base.routers.items():
            self._places[name] = _itself(name, shape)
        self._names = ModuleNames(base, {*self._places, *self._reasons, *base.experts})

    def find(self, path: str) -> Place | None:
        """None when no module, or more than one, is meant, or its rows are not known."""
        name = self._names.find(path)
        if name is None or name in self._reasons:
            return None
        if name not in self._places and name in self._base.modules:
            return _itself(name, self._base.modules[name])
        return self._places.get(name)

    def find_experts(self, path: str) -> ExpertsPlace | None:
        """The experts of a layer, if LoRA of this name is that of all of them in one.

        On a parameter PEFT wraps the module, once for each of its parameters, one around the other;
        others have names for what is in it (``experts.w1``).
        """
        parent, _, leaf = path.rpartition(".")
        parts = parts_in(leaf)
        name = self._names.find(parent if parts else path.removesuffix(WRAPPED))
        if name is None or name not in self._base.experts:
            return None
        return ExpertsPlace(name, parts)

    def why_not(self, path: str) -> str:
        """Why ``find`` gave None, in words for an operator."""
        name = self._names.find(path)
        if name is not None:
            return self._reasons[name]
        parent, _, leaf = path.rpartition(".")
        if leaf in _PARTS_OF_ATTENTION:
            for fused in _ATTENTION_IN_ONE:
                if self._names.find(f"{parent}.{fused}") is not None:
                    return self._inside(fused)
        reason = self._names.why_not(path)
        if leaf in _ATTENTION_IN_ONE and leaf not in self._leaves:
            reason += f"; {leaf} is split only where the order of its rows is certain"
        return reason

    @cached_property
    def _leaves(self) -> frozenset[str]:
        return frozenset(map(_leaf, self._base.modules))

    def _add_to_split_base(self, fusion: Fusion) -> None:
        """The fused linear's rows go to the parts that the base has."""
        said = self._up_first if _is_gate_up(fusion) else None
        if not fusion.order_is_known and said is None:
            self._reasons[fusion.fused] = self._apart(fusion)
            return
        stored = fusion.rows[::-1] if said else fusion.rows
        self._places[fusion.fused] = Place(
            ModuleShape(fusion.in_features, sum(fusion.sizes)),
            tuple(
                Target(part, stored_rows=(rows,))
                for part, rows in zip(fusion.parts, stored, strict=True)
            ),
        )

    def _add_to_fused_base(self, fusion: Fusion) -> None:
        """The parts' rows lie inside the linear that the base has, in the base's own order."""
        said = self._up_first if _is_gate_up(fusion) else None
        if not fusion.order_is_known:
            self._reasons |= dict.fromkeys(fusion.parts, self._inside(fusion.fused))
            if said is not None:
                self._reasons[fusion.fused] = (
                    f"swap_gate_up is said, but {self._order_is_not_known()}"
                )
            return
        if said:
            swapped = Target(fusion.fused, stored_rows=fusion.rows[::-1])
            self._places[fusion.fused] = Place(self._base.modules[fusion.fused], (swapped,))
        for part, rows in zip(fusion.parts, fusion.rows, strict=True):
            shape = ModuleShape(fusion.in_features, len(rows))
            self._places[part] = Place(shape, (Target(fusion.fused, rows),))

    def _inside(self, fused: str) -> str:
        return f"the base has this inside {_leaf(fused)}; {self._order_is_not_known()}"

    def _apart(self, fusion: Fusion) -> str:
        leaf = _leaf(fusion.fused)
        remedy = f"split {leaf}"
        if _is_gate_up(fusion):
            remedy += " or say swap_gate_up in adapter_config.json"
        parts = ", ".join(map(_leaf, fusion.parts))
        return f"the base has {parts} instead of {leaf}; {self._order_is_not_known()}: {remedy}"

    def _order_is_not_known(self) -> str:
        return f"for model type {self._base.model_type} it is not known in which order rows stand"


def _itself(name: str, shape: ModuleShape) -> Place:
    return Place(shape, (Target(name),))


def _is_gate_up(fusion: Fusion) -> bool:
    return _leaf(fusion.fused) == GATE_UP


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
