"""Which adapters have a copy in host memory, and which give theirs up for others."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

from loramux.types import AdapterId


class HostTier:
    """Bytes of host memory, given to adapters in use and taken from the one unused the longest.

    A copy is ``fetching`` from the moment room is made for it until it is there or has failed; its
    bytes count from the first moment on.
    """

    def __init__(self, capacity_bytes: int, max_copies: int | None = None) -> None:
        """``max_copies``: how many there may be, whatever their bytes; None: any number."""
        self.capacity_bytes = capacity_bytes
        self._max_copies = math.inf if max_copies is None else max_copies
        self.used_bytes = 0
        self.num_evictions = 0
        self._copies: OrderedDict[AdapterId, int] = OrderedDict()  # least recently used first
        self._fetching: dict[AdapterId, int] = {}

    def __contains__(self, adapter_id: AdapterId) -> bool:
        """Whether the copy is there."""
        return adapter_id in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def fetching(self) -> Collection[AdapterId]:
        """Adapters whose copies are on their way."""
        return self._fetching.keys()

    def make_room(
        self, adapter_id: AdapterId, num_bytes: int, kept: Collection[AdapterId]
    ) -> list[AdapterId] | None:
        """Begin to fetch; whose copies must go for it. None if it must wait, and nothing changes.

        Adapters that are ``kept`` keep their copies.
        """
        assert adapter_id not in self._copies, "the copy is there"
        assert adapter_id not in self._fetching, "the copy is on its way"
        victims = self._victims(num_bytes, kept)
        if victims is not None:
            for victim in victims:
                self.used_bytes -= self._copies.pop(victim)
            self.num_evictions += len(victims)
            self._fetching[adapter_id] = num_bytes
            self.used_bytes += num_bytes
        return victims

    def has_room(self, num_bytes: int, kept: Collection[AdapterId]) -> bool:
        """Whether ``make_room`` would find some."""
        return self._victims(num_bytes, kept) is not None

    def arrived(self, adapter_id: AdapterId) -> None:
        """The copy is there."""
        self._copies[adapter_id] = self._fetching.pop(adapter_id)

    def failed(self, adapter_id: AdapterId) -> None:
        """No copy will come."""
        self.used_bytes -= self._fetching.pop(adapter_id)

    def touch(self, adapter_id: AdapterId) -> None:
        """The adapter is in use: its copy is to be the last to go."""
        self._copies.move_to_end(adapter_id)

    def forget(self, adapter_id: AdapterId) -> bool:
        """Drop an adapter; whether it had a copy. One that is on its way is dropped, too."""
        self.used_bytes -= self._fetching.pop(adapter_id, 0)
        num_bytes = self._copies.pop(adapter_id, None)
        self.used_bytes -= num_bytes or 0
        return num_bytes is not None

    def check(self) -> None:
        """Assert that the bytes add up."""
        assert not self._copies.keys() & self._fetching.keys()
        held = sum(self._copies.values()) + sum(self._fetching.values())
        assert self.used_bytes == held <= self.capacity_bytes
        assert self._num_copies <= self._max_copies

    def _victims(self, num_bytes: int, kept: Collection[AdapterId]) -> list[AdapterId] | None:
        free_bytes = self.capacity_bytes - self.used_bytes
        free_copies = self._max_copies - self._num_copies
        victims: list[AdapterId] = []
        for candidate, size in self._copies.items():
            if free_copies >= 1 and num_bytes <= free_bytes:
                break
            if candidate not in kept:
                victims.append(candidate)
                free_bytes += size
                free_copies += 1
        return victims if free_copies >= 1 and num_bytes <= free_bytes else None

    @property
    def _num_copies(self) -> int:
        return len(self._copies) + len(self._fetching)
