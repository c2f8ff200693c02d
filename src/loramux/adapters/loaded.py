"""An adapter in memory, read and checked, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.adapters.report import Report
from loramux.adapters.spec import LoraSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedAdapter:
    """What an adapter does (``spec``) and its weights on the CPU, in the dtypes of the file."""

    spec: LoraSpec
    tensors: Mapping[str, torch.Tensor]
    num_bytes: int
    """Bytes of all tensors as stored."""


def refuse_leftovers(adapter: LoadedAdapter, report: Report) -> None:
    """For those who carry deltas alone elsewhere: refuse tensors that are no part of any."""
    used = {key for d in adapter.spec.deltas for key in (d.a, d.b, d.magnitude)}
    for key in adapter.tensors.keys() - used:
        report.refuse("only deltas of linears can be converted or merged", key)
