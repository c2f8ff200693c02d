"""Which module of the base an adapter's module is, whatever prefix its file uses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

from loramux.adapters.experts import other_spellings
from loramux.adapters.spec import BaseLayout

_LANGUAGE = "language_model"
_OTHER_TOWER = re.compile(
    r"(^|\.)(vision\w*|visual|image\w*|audio\w*|multi_modal_projector|mm_projector)(\.|$)"
)
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")
_ROUTER = re.compile(r"(^|\.)(block_sparse_moe|mlp|moe|feed_forward)\.(gate|router)$")

_NEVER_SERVED = ((_OTHER_TOWER, "LoRA on the vision or audio part of a model is not served"),)

MAX_EXPLAINED = 1_000
"""Names that match nothing and are told why; to tell takes longer than to find, so further ones of
a hostile file are counted."""


class ModuleNames:
    """Finds modules of one base by the spellings that adapters use for them.

    A base module ``model.layers.0.mlp.up_proj`` is also found as ``layers.0.mlp.up_proj`` (the
    adapter was trained on the model without its head) and with or without ``language_model`` (on
    a multimodal wrapper). All else of a name must agree, so a vision tower's layers stay apart.
    """

    def __init__(self, base: BaseLayout, others: Iterable[str] = ()) -> None:
        """``others``: names to be found beside those of the base's own modules."""
        self._base = base
        self._names = {*base.modules, *others}
        self._by_spelling: dict[str, str] = {}
        self._shared: dict[str, set[str]] = defaultdict(set)
        """Spellings of more than one name, and which."""
        for name in self._names:
            for spelling in _spellings(name):
                other = self._by_spelling.setdefault(spelling, name)
                if other != name:
                    self._shared[spelling] |= {other, name}

    def find(self, path: str) -> str | None:
        """The base's name of a module; None when no module, or more than one, is meant."""
        if path in self._names:
            return path
        meant = self._meant(path)
        return next(iter(meant)) if len(meant) == 1 else None

    def why_not(self, path: str) -> str:
        """Why ``find`` gave None, in words for an operator."""
        if len(self._meant(path)) > 1:
            return "ambiguous names match more than one module of the base"
        if (words := never_served(path)) is not None:
            return words
        if _EXPERT.search(path):
            return "no such expert can take LoRA: the base has no such experts, or of another kind"
        if _ROUTER.search(path):
            return "LoRA on the router (gate) of a mixture of experts is not served on this base"
        if path in self._base.other_modules:
            return f"modules of {self._base.name} that are no linear cannot take LoRA"
        if _any_layer(_without_language(path)) in self._any_layer:
            return f"no module of {self._base.name} has this name: it has no such layer"
        return f"no module of {self._base.name} has this name"

    def _meant(self, path: str) -> set[str]:
        """All names of the base of which this is a spelling."""
        path = _without_language(path)
        meant: set[str] = set()
        for spelling in (path, *other_spellings(path)):
            if spelling in self._shared:
                meant |= self._shared[spelling]
            elif spelling in self._by_spelling:
                meant.add(self._by_spelling[spelling])
        return meant

    @cached_property
    def _any_layer(self) -> frozenset[str]:
        return frozenset(map(_any_layer, self._by_spelling))


def never_served(path: str) -> str | None:
    """Why no base can serve LoRA on a module of this name, or None where the base decides."""
    return next((words for pattern, words in _NEVER_SERVED if pattern.search(path)), None)


def _spellings(name: str) -> tuple[str, ...]:
    """A base module's name without ``language_model``, and also without its first word."""
    full = _without_language(name)
    rest = full.partition(".")[2]
    return (full, rest) if rest else (full,)


def _any_layer(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _without_language(name: str) -> str:
    if _LANGUAGE not in name:  # nearly always, and far cheaper than to take the name apart
        return name
    return ".".join(part for part in name.split(".") if part != _LANGUAGE)
