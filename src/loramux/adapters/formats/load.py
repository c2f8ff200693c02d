"""From a configuration and a weight header to an adapter in memory: the way of every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.meaning import Meaning
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.formats.shared_layout import SharedSides
from loramux.adapters.formats.shared_sides import find_shared
from loramux.adapters.formats.tensors import check_values
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec


@dataclass(frozen=True)
class WeightFile:
    """A weight file whose header is sound; tensors have the names and shapes of PEFT."""

    entries: Mapping[str, TensorEntry]
    read: Callable[[], Mapping[str, Tensor]]
    """Raises MalformedFile when the file has changed."""


@dataclass(frozen=True)
class CheckedAdapter:
    """An adapter that is right as far as that can be told without its numbers."""

    name: str
    spec: LoraSpec
    _weights: WeightFile
    _report: Report
    _shared: SharedSides

    def read(self) -> LoadedAdapter:
        """The same with its numbers, on the CPU. Raises AdapterRefused, with all that is wrong."""
        spec, report = self.spec, self._report
        tensors: dict[str, Tensor] = {}
        try:
            stored = self._weights.read()
            check_values(spec, stored, report)
            sources = {share.source for share in spec.shares}
            tensors = {name: tensor for name, tensor in stored.items() if name not in sources}
            tensors |= {share.name: share.cut(stored[share.source]) for share in spec.shares}
            named = spec.tensor_names
            spec = replace(spec, deltas=find_shared(spec.deltas, tensors, self._shared, report))
            for copy in named - spec.tensor_names:
                del tensors[copy]
        except MalformedFile as problem:
            report.refuse(str(problem))
        report.raise_if_refused(self.name)
        return LoadedAdapter(spec, tensors, sum(t.nbytes for t in tensors.values()))


def check(
    name: str,
    config: Meaning | None,
    weights: WeightFile | None,
    base: BaseLayout,
    *,
    max_rank: int,
    report: Report,
    shared: SharedSides | None = None,
) -> CheckedAdapter:
    """Check an adapter for ``base``.

    No tensor can be read before every shape is the one that ``base`` and ``config`` ask for, which
    bounds the memory. ``shared``: what the experts are said to have in common. None stands for what
    ``report`` has refused. Raises AdapterRefused, with all that is wrong.
    """
    spec = None
    if config is not None and weights is not None:
        spec = build_spec(config, weights.entries, base, max_rank=max_rank, report=report)
    report.raise_if_refused(name)
    assert weights is not None, "nothing was refused, so all is there"
    assert spec is not None
    return CheckedAdapter(name, spec, weights, report, shared or {})
