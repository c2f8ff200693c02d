"""What requests find of their adapters, and advice when adapters take slots from each other."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from loramux.adapters.residency import Residency
from loramux.types import AdapterId, Tier

log = logging.getLogger(__name__)

WINDOW = 60.0
"""Seconds that are looked back on."""
MANY_SWAPS = 60
"""Swaps within the window from which on there is advice."""
ADVICE_EVERY = 600.0
"""Seconds between two lines of advice."""


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """What took part in a window, and what there is room for."""

    num_swaps: int
    num_adapters: int
    """Distinct ones that were asked for or are pinned."""
    num_bytes: int
    """Of these."""
    num_slots: int
    capacity_bytes: int
    slot_bytes: int
    """That one more slot adds to the arena; 0 where its size does not hang on the slots."""


def advice(pressure: Pressure) -> str | None:
    """The options that would end the swapping and what they cost; None where nothing would."""
    p = pressure
    more_slots = max(0, p.num_adapters - p.num_slots)
    grown = p.capacity_bytes + more_slots * p.slot_bytes
    flags = [f"--max-loras {p.num_adapters}"] if more_slots else []
    if p.num_bytes > grown:
        grown = p.num_bytes
        flags.append(f"--device-cache {grown}")
    if not flags:
        return None
    added = grown - p.capacity_bytes
    cost = f" (+{math.ceil(added / 1e6)} MB)" if added else ""
    return (
        f"{p.num_adapters} adapters alternate over {p.num_slots} slots, {p.num_swaps} swaps in "
        f"the last {WINDOW:.0f} s: start with {' '.join(flags)}{cost}"
    )


class PoolWatch:
    """Counts finds, and warns of swapping at most every ``ADVICE_EVERY`` seconds.

    A swap is an adapter that gives up its slot to another one.
    """

    def __init__(
        self, residency: Residency, *, slot_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._residency = residency
        self._slot_bytes = slot_bytes
        self._clock = clock
        self._asked: dict[AdapterId, float] = {}
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])
        """Swaps so far, once a second over the window."""
        self._advised_at = -math.inf
        self.found: Counter[Tier] = Counter()

    def note_request(self, adapter_id: AdapterId) -> None:
        """A sequence has been queued: count where its adapter is at this moment."""
        self.found[self._residency.tier_of(adapter_id)] += 1
        self._asked[adapter_id] = self._clock()

    def look(self) -> None:
        """Log advice where there have been many swaps. Cheap enough for every step."""
        now = self._clock()
        if now - self._samples[-1][0] < 1.0:
            return
        self._samples.append((now, self._residency.num_evictions))
        while self._samples[0][0] < now - WINDOW:
            self._samples.popleft()
        self._asked = {a: at for a, at in self._asked.items() if at >= now - WINDOW}
        swaps = self._samples[-1][1] - self._samples[0][1]
        if swaps >= MANY_SWAPS and now - self._advised_at >= ADVICE_EVERY:
            text = advice(self._pressure(swaps))
            if text is not None:
                log.warning("%s", text)
                self._advised_at = now

    def _pressure(self, num_swaps: int) -> Pressure:
        residency = self._residency
        known = {a for a in self._asked if residency.knows(a)} | residency.pinned
        return Pressure(
            num_swaps=num_swaps,
            num_adapters=len(known),
            num_bytes=sum(residency.bytes_of(a) for a in known),
            num_slots=residency.num_slots,
            capacity_bytes=residency.capacity_bytes,
            slot_bytes=self._slot_bytes,
        )
