"""From configuration, weight header and base layout to a LoraSpec. No tensor is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from loramux.adapters.experts import inside
from loramux.adapters.formats.meaning import Meaning
from loramux.adapters.formats.module_names import MAX_EXPLAINED
from loramux.adapters.formats.peft_experts import ExpertsBuilder, ExpertTensors
from loramux.adapters.formats.peft_keys import (
    DeltaKey,
    ParameterKey,
    Part,
    describe_other,
    parse_key,
)
from loramux.adapters.formats.peft_patterns import BadPattern
from loramux.adapters.formats.places import WRAPPED, ExpertsPlace, Place, Places, Target
from loramux.adapters.formats.replaced import ReplacementBuilder
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.fusions import GATE_UP
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import BaseLayout, ExpertShare, LoraSpec, ModuleDelta, ModuleShape

SERVED_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

_MOST_NAMES_OF_ALL = 2
"""For the experts of a layer: PEFT has one name for each of two parameters."""

Entries = Mapping[str, TensorEntry]


@dataclass
class _Group:
    """The tensors of one module of the adapter, by part."""

    path: str
    keys: dict[Part, str] = field(default_factory=dict)
    of_embedding: bool = False
    """Spelled as PEFT does for embeddings."""


def build_spec(
    config: Meaning, entries: Entries, base: BaseLayout, *, max_rank: int, report: Report
) -> LoraSpec | None:
    """The deltas of an adapter in the order of the base's modules, and what it replaces.

    Every tensor ends in the deltas of exactly one name of the adapter, which is one delta unless
    the base is fused differently, in a replacement, or in a refusal; None when there is any.
    """
    _check_dtypes(entries, report)
    deltas_said, parameters = _told_apart(entries, report)
    groups = _group(deltas_said, report)
    places = Places(base, up_first=config.swap_gate_up)
    of_experts = {p: found for p in groups if (found := places.find_experts(p)) is not None}
    placed = _place({p: g for p, g in groups.items() if p not in of_experts}, places, base, report)
    builder = _DeltaBuilder(config, entries, base.embedding, base.routers, report)
    experts = ExpertsBuilder(config, entries, report)
    shares: list[ExpertShare] = []
    try:
        deltas = [delta for place, group in placed for delta in builder.deltas(place, group)]
        closed: dict[str, list[str]] = {}
        spellings = Counter(of_experts.values())
        for path, place in of_experts.items():
            # Before they are taken apart: a hostile file may have any number of spellings.
            if spellings[place] > _MOST_NAMES_OF_ALL:
                report.refuse("duplicate: two names are meant for the same place", path)
                continue
            tensors = builder.expert_tensors(groups[path])
            found = tensors and experts.unfold(place, base.experts[place.experts], tensors)
            if found:
                deltas += found.deltas
                shares += found.shares
                closed[path] = [p for d in found.deltas for p in base.closed_parts(d.module)]
        _check_open(closed, base, report)
    except BadPattern as problem:
        report.refuse(f"rank_pattern or alpha_pattern {problem}")
        return None
    _check_experts_once(deltas, of_experts, report)
    _check_parameters(config.beside.parameters, groups, base, report, any_experts=bool(of_experts))
    if groups and not placed and not of_experts:
        report.refuse(
            f"not one module of the adapter matches {base.name}: it was made for another model"
        )
    order = {name: i for i, name in enumerate((*base.modules, *base.routers))}
    deltas.sort(key=lambda d: (order[d.module], 0 if d.rows is None else d.rows.start))
    adapted = {target.module for place, _ in placed for target in place.targets}
    replaced = ReplacementBuilder(config.beside, base, report).build(parameters, entries, adapted)
    _check_max_rank(LoraSpec(tuple(deltas)), max_rank, report)
    if report.refused:
        return None
    _warn_about_targets(config, [group.path for _, group in placed], report)
    _warn_about_base(config, base, report)
    return LoraSpec(
        tuple(deltas), report.warnings, replaced.values, replaced.vocab_size, tuple(shares)
    )


def _check_dtypes(entries: Entries, report: Report) -> None:
    for key, entry in entries.items():
        if entry.dtype not in SERVED_DTYPES:
            report.refuse(f"dtype {entry.dtype} is not served: store weights as F16 or F32", key)


def _told_apart(
    entries: Entries, report: Report
) -> tuple[dict[str, DeltaKey], dict[str, ParameterKey]]:
    """The tensors of LoRA, and those that are values for parameters of the base."""
    deltas: dict[str, DeltaKey] = {}
    parameters: dict[str, ParameterKey] = {}
    for key in entries:
        parsed = parse_key(key)
        if isinstance(parsed, DeltaKey):
            deltas[key] = parsed
        elif parsed is not None:
            parameters[key] = parsed
        else:
            report.refuse(describe_other(key), key)
    if not entries:
        report.refuse("the weight file holds no tensors")
    elif not deltas:
        report.refuse("the weight file holds no tensors of LoRA")
    return deltas, parameters


def _group(said: Mapping[str, DeltaKey], report: Report) -> dict[str, _Group]:
    """Tensors by the adapter's own name of their module."""
    groups: dict[str, _Group] = {}
    adapters: set[str] = set()
    for key, parsed in said.items():
        if parsed.adapter is not None:
            adapters.add(parsed.adapter)
        group = groups.setdefault(parsed.path, _Group(parsed.path))
        if parsed.part in group.keys:
            report.refuse("duplicate: two tensors are meant for the same place", key)
        group.keys[parsed.part] = key
        group.of_embedding |= parsed.of_embedding
    if len(adapters) > 1:
        for adapter in sorted(adapters):
            report.refuse("the file holds more than one adapter", adapter)
    return groups


def _place(
    groups: Mapping[str, _Group], places: Places, base: BaseLayout, report: Report
) -> list[tuple[Place, _Group]]:
    """Groups with the place in the base that each of them changes."""
    placed: list[tuple[Place, _Group]] = []
    closed: dict[str, list[str]] = {}
    unplaced: list[str] = []
    taken: dict[str, list[Target]] = {}
    for path, group in groups.items():
        place = places.find(path)
        if place is None:
            unplaced.append(path)
        elif any(t.overlaps(o) for t in place.targets for o in taken.get(t.module, ())):
            report.refuse("duplicate: two names are meant for the same place", path)
        else:
            placed.append((place, group))
            closed[path] = [p for t in place.targets for p in base.closed_parts(t.module, t.rows)]
            for target in place.targets:
                taken.setdefault(target.module, []).append(target)
    _check_open(closed, base, report)
    _explain(unplaced, places, base, report)
    return placed


def _check_parameters(
    named: Sequence[str],
    groups: Mapping[str, _Group],
    base: BaseLayout,
    report: Report,
    *,
    any_experts: bool,
) -> None:
    """Parameters that the configuration names must have tensors: PEFT gives each its own."""
    if not named:
        return
    adapted = {end for path in groups for end in _endings(path.removesuffix(WRAPPED))}
    if any_experts:
        adapted.add("")  # a name may be that of the parameter alone
    missing = [parameter for parameter in named if parameter.rpartition(".")[0] not in adapted]
    if missing:
        where = "" if base.experts else f", and {base.name} has no experts that can take LoRA"
        report.refuse(
            f"target_parameters: {', '.join(map(printable, missing))} have no tensors in the file"
            f"{where}"
        )


def _check_experts_once(
    deltas: Sequence[ModuleDelta], of_experts: Mapping[str, ExpertsPlace], report: Report
) -> None:
    """Tensors of all experts may meet each other, and those of single experts."""
    counts = Counter(delta.module for delta in deltas)
    places = (inside(name) for name, count in counts.items() if count > 1)
    twice = {place.experts for place in places if place is not None}
    for path, place in of_experts.items():
        if place.experts in twice:
            report.refuse("duplicate: two names are meant for the same place", path)


def _check_open(closed: Mapping[str, list[str]], base: BaseLayout, report: Report) -> None:
    """``closed``: what the operator has not opened, by the adapter's name of the module."""
    leaves = dict.fromkeys(p.rpartition(".")[2] for parts in closed.values() for p in parts)
    if base.open_modules is None or not leaves:
        return
    option = f"--lora-target-modules {base.open_modules.words}"
    for path, parts in closed.items():
        if parts:
            report.refuse(
                f"{option} does not open these modules: start with {','.join([option, *leaves])}",
                path,
            )


def _explain(paths: Sequence[str], places: Places, base: BaseLayout, report: Report) -> None:
    """Refuse names for which there is no place."""
    for path in paths[:MAX_EXPLAINED]:
        report.refuse(places.why_not(path), path)
    if len(paths) > MAX_EXPLAINED:
        rest = len(paths) - MAX_EXPLAINED
        report.refuse(f"{rest} names more cannot be placed in {base.name}")


@dataclass(frozen=True)
class _DeltaBuilder:
    """Turns the tensors of one module into its deltas, or into refusals."""

    config: Meaning
    entries: Entries
    embedding: str | None
    routers: Collection[str]
    report: Report

    def deltas(self, place: Place, group: _Group) -> list[ModuleDelta]:
        """None of them after a refusal. Raises BadPattern when rank or scale cannot be told."""
        a, b = group.keys.get("lora_A"), group.keys.get("lora_B")
        magnitude, b_bias = group.keys.get("lora_magnitude_vector"), group.keys.get("lora_B.bias")
        self._check_dora(magnitude, group.path)
        self._check_b_bias(b_bias, group)
        if place.targets[0].module in self.routers and (magnitude or b_bias):
            self.report.refuse("DoRA and a bias of lora_B on a router are not served", group.path)
        if group.of_embedding != (place.targets[0].module == self.embedding):
            self.report.refuse(
                "an embedding has lora_embedding_A and B, and all else lora_A and lora_B",
                group.path,
            )
        if a is None or b is None:
            missing = " and ".join(p for p, key in (("lora_A", a), ("lora_B", b)) if key is None)
            self.report.refuse(f"{missing} is missing (incomplete pair)", group.path)
            return []
        rank, scale = self.config.rank_and_scale(group.path)
        deltas = [
            ModuleDelta(t.module, rank, scale, a, b, magnitude, t.rows, t.stored_rows, b_bias)
            for t in place.targets
        ]
        return deltas if self._shapes_fit(deltas[0], place.shape, group.path) else []

    def expert_tensors(self, group: _Group) -> ExpertTensors | None:
        """A and B of all experts in one, for which nobody has other tensors."""
        a, b = group.keys.get("lora_A"), group.keys.get("lora_B")
        others = group.keys.keys() - {"lora_A", "lora_B"}
        if others:
            what = " and ".join(sorted(others))
            self.report.refuse(f"{what} on all experts in one is not served", group.path)
        elif self.config.use_dora or self.config.beside.lora_bias:
            said = "use_dora" if self.config.use_dora else "lora_bias"
            self.report.refuse(f"{said} is true, of which experts in one have nothing", group.path)
        if a is None or b is None:
            self.report.refuse("lora_A or lora_B is missing (incomplete pair)", group.path)
            return None
        return ExpertTensors(group.path, a, b)

    def _check_dora(self, magnitude: str | None, path: str) -> None:
        if self.config.use_dora and magnitude is None:
            self.report.refuse("lora_magnitude_vector is missing, use_dora (DoRA) is true", path)
        if not self.config.use_dora and magnitude is not None:
            self.report.refuse("lora_magnitude_vector is there, use_dora (DoRA) is not true", path)

    def _check_b_bias(self, b_bias: str | None, group: _Group) -> None:
        if self.config.beside.lora_bias and b_bias is None and not group.of_embedding:
            self.report.refuse("the bias of lora_B is missing, lora_bias is true", group.path)
        if b_bias is not None and not self.config.beside.lora_bias:
            self.report.refuse("lora_B has a bias, lora_bias is not true", group.path)

    def _shapes_fit(self, delta: ModuleDelta, shape: ModuleShape, path: str) -> bool:
        """Whether all shapes are right; if not, the plainest reason goes to the report."""
        a, b = self.entries[delta.a].shape, self.entries[delta.b].shape
        if 0 in a + b:
            self.report.refuse("empty tensors (a size is 0), perhaps shards not gathered", path)
            return False
        rank_a = a[0] if len(a) == 2 else delta.rank
        rank_b = b[1] if len(b) == 2 else delta.rank
        fits = self._fits(delta.a, a, (rank_a, shape.in_features))
        fits &= self._fits(delta.b, b, (shape.out_features, rank_b))
        for vector in (delta.magnitude, delta.b_bias):
            if vector is not None:
                fits &= self._fits(vector, self.entries[vector].shape, (shape.out_features,))
        return fits and self._rank_fits(delta.rank, rank_a, rank_b, path)

    def _fits(self, key: str, got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        if got != expected:
            self.report.refuse(f"shape {list(got)} where {list(expected)} is expected", key)
        return got == expected

    def _rank_fits(self, rank: int, rank_a: int, rank_b: int, path: str) -> bool:
        if rank_a != rank_b:
            self.report.refuse(f"lora_A has rank {rank_a}, but lora_B has rank {rank_b}", path)
        elif rank_a != rank:
            self.report.refuse(
                f"the weights have rank {rank_a}, but the configuration says rank {rank}", path
            )
        return rank_a == rank_b == rank


def _check_max_rank(spec: LoraSpec, max_rank: int, report: Report) -> None:
    ranks = {name: [d.rank for d in deltas] for name, deltas in spec.by_module().items()}
    if not ranks:
        return
    module, largest = max(ranks.items(), key=lambda item: sum(item[1]))
    rank = sum(largest)
    if rank <= max_rank:
        return
    what = f"rank {rank}"
    if len(largest) > 1:
        parts = " + ".join(map(str, largest))
        what += f" (the sum {parts} of the parts of {module.rpartition('.')[2]}, which is one here)"
    report.refuse(f"{what} is above the limit of {max_rank}: start with --max-rank {rank}")


def _warn_about_targets(config: Meaning, paths: list[str], report: Report) -> None:
    endings = {ending for path in paths for ending in _endings(path)}
    for target in config.targets:
        if target not in endings:
            report.warn("target_modules names modules that have no tensors in the file", target)
    if config.swap_gate_up is not None and GATE_UP not in endings:
        report.warn(f"swap_gate_up is said, but the file has no {GATE_UP}")


def _endings(path: str) -> set[str]:
    """``a.b.c`` gives itself, ``b.c`` and ``c``."""
    parts = path.split(".")
    return {".".join(parts[i:]) for i in range(len(parts))}


def _warn_about_base(config: Meaning, base: BaseLayout, report: Report) -> None:
    trained_on = config.base_model
    if trained_on is not None and _last_part(trained_on) != _last_part(base.name):
        report.warn(
            f"the adapter names {printable(trained_on)} as its base; this server runs {base.name}"
        )


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
