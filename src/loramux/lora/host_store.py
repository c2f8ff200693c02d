"""The host tier: adapters packed and ready to be copied to the device."""

from __future__ import annotations

from loramux.lora.weights import HostCopy
from loramux.types import AdapterId


class HostStore:
    """Host copies by adapter id; the catalog says when one is no longer needed.

    A copy that is on its way to the device outlives its place here (``lora/transfers.py``).
    """

    def __init__(self) -> None:
        self._copies: dict[AdapterId, HostCopy] = {}

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._copies

    def __getitem__(self, adapter_id: AdapterId) -> HostCopy:
        return self._copies[adapter_id]

    def add(self, adapter_id: AdapterId, copy: HostCopy) -> None:
        self._copies[adapter_id] = copy

    def drop(self, adapter_id: AdapterId) -> None:
        del self._copies[adapter_id]

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())
