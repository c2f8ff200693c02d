"""Tensors beside LoRA's: which parameters of the base have values of the adapter's own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from loramux.adapters.formats.meaning import BesideLora
from loramux.adapters.formats.module_names import MAX_EXPLAINED, ModuleNames
from loramux.adapters.formats.peft_keys import ParameterKey
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.formats.vocabulary import ends_of, grown_to, objections
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import BaseLayout, Replacement


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor, and the parameter of the base that it is for."""

    key: str
    said: ParameterKey
    module: str

    @property
    def place(self) -> _Place:
        return _Place(self.module, self.said.parameter, self.said.origin == "tokens")


class _Place(NamedTuple):
    """What only one tensor may be for. Single tokens may come on top of a whole weight."""

    module: str
    parameter: str
    of_tokens: bool = False


class Replaced(NamedTuple):
    """What an adapter replaces."""

    values: tuple[Replacement, ...] = ()
    vocab_size: int | None = None
    """Where the adapter has more tokens than the base."""


class ReplacementBuilder:
    """Turns tensors that are no part of LoRA into replacements, or into refusals."""

    def __init__(self, beside: BesideLora, base: BaseLayout, report: Report) -> None:
        self._beside = beside
        self._base = base
        self._report = report
        self._names = ModuleNames(base, base.replaceable)

    def build(
        self,
        keys: Mapping[str, ParameterKey],
        entries: Mapping[str, TensorEntry],
        adapted: Collection[str],
    ) -> Replaced:
        """``adapted``: modules of the base that have LoRA, which whole weights must leave alone."""
        first: dict[_Place, _Found] = {}
        for f in self._without_copies(self._match(keys), entries):
            if first.setdefault(f.place, f) is not f:
                self._report.refuse("duplicate: two tensors are meant for the same place", f.key)
        for f in first.values():
            if (objection := self._objection(f, adapted)) is not None:
                self._report.refuse(objection, f.key)
        self._check_complete(first)
        whole = ((p.module, entries[f.key].shape) for p, f in first.items() if not p.of_tokens)
        vocab_size = grown_to(self._base, whole)
        made = [
            r
            for f in first.values()
            if (r := self._make(f, entries[f.key], vocab_size)) is not None
        ]
        made = tuple(self._tied(made, first))
        if vocab_size is not None:
            for objection, place in objections(self._base, vocab_size, made, adapted):
                self._report.refuse(objection, place)
        return Replaced(made, vocab_size)

    def _without_copies(
        self, found: Sequence[_Found], entries: Mapping[str, TensorEntry]
    ) -> Iterator[_Found]:
        """All but what PEFT writes again beside an embedding or a head, and does not go by.

        Where it saves them unasked and modules_to_save names them, a file has three of each.
        """
        own = {f.place: f for f in found if f.said.origin == "own"}
        for f in found:
            beside = own.get(f.place)
            if f.said.origin == "original":
                if beside is None or not self._is_shadowed(f.module, own):
                    self._report.refuse(
                        "original_module is the base's, and the file does not have all that "
                        "stands in for it",
                        f.key,
                    )
                    continue
            elif f.said.origin != "copy" or beside is None:
                yield f
                continue
            shape, expected = entries[f.key].shape, entries[beside.key].shape
            if shape == expected:
                self._report.warn("copies in the file that PEFT does not go by either", f.key)
            else:
                self._report.refuse(
                    f"shape {list(shape)} where {list(expected)} is expected", f.key
                )

    def _is_shadowed(self, module: str, own: Collection[_Place]) -> bool:
        """Whether nothing of a base's embedding or head acts where these parameters are own."""
        ends = ends_of(self._base)
        concerned = ends if self._base.tied else (module,)
        return module in ends and all(_Place(end, "weight") in own for end in concerned)

    def _match(self, keys: Mapping[str, ParameterKey]) -> list[_Found]:
        """Tensors with the parameters that they are for; the others are refused."""
        found: list[_Found] = []
        num_strange = 0
        for key, said in keys.items():
            module = self._names.find(said.path)
            if module is not None and said.parameter in self._base.replaceable.get(module, ()):
                found.append(_Found(key, said, module))
            else:
                num_strange += 1
                if num_strange <= MAX_EXPLAINED:
                    self._report.refuse(self._why_not(said, module), key)
        if num_strange > MAX_EXPLAINED:
            rest = num_strange - MAX_EXPLAINED
            self._report.refuse(f"{rest} tensors more are for nothing that can be replaced")
        return found

    def _why_not(self, said: ParameterKey, module: str | None) -> str:
        """Why a tensor is for nothing that can be replaced, in words for an operator."""
        if module in self._base.replaceable:
            return f"a {said.parameter} that the base's modules of this name do not have"
        if module is not None or said.path in self._base.other_modules:
            return f"{said.parameter}s of such modules cannot be replaced here"
        return self._names.why_not(said.path)

    def _objection(self, found: _Found, adapted: Collection[str]) -> str | None:
        """Why neither the configuration nor the operator allows for a tensor, or None."""
        said, beside = found.said, self._beside
        is_end = found.module in ends_of(self._base)
        # PEFT saves the weight under LoRA of an embedding or head, and calls it base_layer.
        under_lora = is_end and said.origin == "base layer"
        whole = said.parameter == "weight" and said.origin != "tokens"
        if whole and found.module in adapted and not under_lora:
            return "whole weights for a module that has LoRA, too"
        if self._base.closed_parts(found.module):
            return "values for modules that --lora-target-modules does not open to adapters"
        if said.origin == "tokens":
            if self._tokens_of(found) is None:
                return "trainable_token_indices does not say which tokens these rows are for"
            return "tokens of an embedding that has LoRA, too" if found.module in adapted else None
        if self._is_saved(said.path):
            return None
        if is_end:
            return None  # PEFT writes them unasked once the vocabulary or one of them has changed
        if said.parameter == "bias":
            return None if beside.bias != "none" else "biases are in the file, and bias is none"
        return "whole weights are in the file that modules_to_save does not name"

    def _is_saved(self, path: str) -> bool:
        """Whether modules_to_save names a module or one that it is in: by the end, as PEFT does."""
        parts = path.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return any(name.endswith(self._beside.modules_to_save) for name in around)

    def _check_complete(self, found: Collection[_Place]) -> None:
        """What modules_to_save names must be there, lest the base's values stand in unnoticed."""
        for module, shapes in self._base.replaceable.items():
            if self._beside.modules_to_save and self._is_saved(module):
                for parameter in shapes:
                    there = _Place(module, parameter) in found
                    if not there and not self._is_tied_away(module, found):
                        self._report.refuse(
                            "modules_to_save names modules that have no tensors in the file",
                            f"{module}.{parameter}",
                        )
        everything = [*self._base.replaceable, *self._base.other_modules]
        for name in self._beside.modules_to_save:
            if not any(module.endswith(name) for module in everything):
                self._report.warn(
                    "modules_to_save names what neither the base nor the file has", printable(name)
                )

    def _is_tied_away(self, module: str, found: Collection[_Place]) -> bool:
        """Whether the other side of a tied embedding brings this one's values."""
        base = self._base
        if not (base.tied and self._beside.ties) or module not in ends_of(base):
            return False
        return any(_Place(end, "weight") in found for end in ends_of(base) if end != module)

    def _make(
        self, found: _Found, entry: TensorEntry, vocab_size: int | None
    ) -> Replacement | None:
        shape = self._base.replaceable[found.module][found.said.parameter]
        if vocab_size is not None and found.module in ends_of(self._base):
            shape = (vocab_size, *shape[1:])
        rows = self._tokens_of(found) if found.said.origin == "tokens" else None
        if rows is not None and rows and max(rows) >= shape[0]:
            self._report.refuse(
                f"trainable_token_indices goes up to {max(rows)}, the vocabulary has {shape[0]}: "
                "save the adapter with save_embedding_layers=True"
            )
            return None
        expected = shape if rows is None else (len(rows), *shape[1:])
        if entry.shape == expected:
            return Replacement(found.module, found.said.parameter, found.key, rows)
        reason = f"shape {list(entry.shape)} where {list(expected)} is expected"
        if found.module in ends_of(self._base):
            reason += (
                " (embedding and lm_head need as many tokens as the base, or more, both alike)"
            )
        self._report.refuse(reason, found.key)
        return None

    def _tokens_of(self, found: _Found) -> tuple[int, ...] | None:
        """The rows that a tensor of single tokens is for, by its module."""
        table = self._beside.token_rows
        named = (rows for name, rows in table.items() if name and found.module.endswith(name))
        return next(named, table.get("") if found.module in ends_of(self._base) else None)

    def _tied(
        self, made: Sequence[Replacement], found: Mapping[_Place, _Found]
    ) -> Iterator[Replacement]:
        """Where embedding and head have one weight, what is not for one side alone is for both.

        So are single tokens, and what PEFT loads straight into the weight; modules_to_save has a
        copy of its own unless ensure_weight_tying is set.
        """
        base = self._base
        for r in made:
            other = base.head if r.module == base.embedding else base.embedding
            is_end = r.module in ends_of(base) and r.parameter == "weight"
            if not (base.tied and is_end) or other is None:
                yield r
                continue
            of_tokens = r.rows is not None
            alone = self._is_alone(found[_Place(r.module, "weight", of_tokens)])
            twin = found.get(_Place(other, "weight", of_tokens))
            if twin is not None and not (of_tokens or alone or self._is_alone(twin)):
                yield replace(r, twin=twin.key)
                continue
            yield r
            if twin is None and not alone:
                yield Replacement(other, "weight", r.tensor, r.rows)

    def _is_alone(self, found: _Found) -> bool:
        """Whether one side of a tied weight has a copy that the other does not share."""
        return self._is_saved(found.said.path) and not self._beside.ties
