"""Adapters whose copies are in host memory, where nothing else matters."""

from __future__ import annotations

from loramux.adapters.residency import Residency
from loramux.types import AdapterId


def add_with_copy(residency: Residency, name: str, num_bytes: int) -> AdapterId:
    """Make an adapter known whose copy is there at once."""
    adapter_id = AdapterId(name)
    residency.add(adapter_id, num_bytes)
    assert residency.make_host_room(adapter_id, in_use=()) is not None
    residency.host.arrived(adapter_id)
    return adapter_id
