"""Which names exist and which adapter each one means. Pure bookkeeping."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from loramux.adapters.report import printable
from loramux.errors import AdapterExists, UnknownAdapter, UnknownModel
from loramux.types import AdapterId


@dataclass(frozen=True)
class Entry:
    """A name and the adapter it stands for now."""

    name: str
    adapter_id: AdapterId
    source: str
    num_bytes: int
    max_rank: int
    pinned: bool = False
    warnings: tuple[str, ...] = ()
    vocab_size: int | None = None
    """Where it has more tokens than the base."""


Check = Callable[[Entry | None], None]
"""Raises where a request cannot go to an adapter; None is the base."""


class Catalog:
    """Names are labels on adapter ids; an id lives while a name or a request holds it.

    A name that is given new bytes means a new id from then on: requests in flight finish on the
    old one. Methods that let go of ids return those that nobody holds any more. Requests are
    admitted by another thread than the one that loads and unloads, hence the lock.
    """

    def __init__(self, base_name: str) -> None:
        self.base_name = base_name
        self._entries: dict[str, Entry] = {}
        self._names: defaultdict[AdapterId, set[str]] = defaultdict(set)
        self._pinned: set[str] = set()
        """These two say again what the entries do, so that no call goes through thousands."""
        self._in_flight: Counter[AdapterId] = Counter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Entry]:
        with self._lock:
            return iter(list(self._entries.values()))

    def check_name(self, name: str, *, replace: bool) -> None:
        """Raise AdapterExists unless ``name`` can be given to an adapter."""
        if not name or name != name.strip():
            raise AdapterExists(name, "a name must not be empty or begin or end with a space")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise AdapterExists(
                printable(name, limit=100), "a name must hold whole characters: it is no UTF-8"
            ) from None
        if name == self.base_name:
            raise AdapterExists(name, "the base model has this name; choose another one")
        if name in self._entries and not replace:
            raise AdapterExists(
                name, "the name is taken; unload it first, or load with load_inplace to replace it"
            )

    def add(self, entry: Entry, *, replace: bool = False) -> list[AdapterId]:
        """Give a name to an adapter. Raises AdapterExists."""
        with self._lock:
            self.check_name(entry.name, replace=replace)
            old = self._entries.get(entry.name)
            self._put(entry)
            return [] if old is None else self._unheld(old.adapter_id)

    def remove(self, name: str) -> list[AdapterId]:
        """Take a name away. Raises UnknownAdapter."""
        with self._lock:
            entry = self._named(name)
            self._untie(entry)
            del self._entries[name]
            return self._unheld(entry.adapter_id)

    def find(self, model: str | None) -> Entry | None:
        """The adapter that a request means; None is the base, and what nobody knows."""
        with self._lock:
            return None if model is None else self._entries.get(model)

    def has(self, name: str) -> bool:
        """Whether a name stands for an adapter now."""
        return self.find(name) is not None

    def entry(self, name: str) -> Entry:
        """Raises UnknownAdapter."""
        with self._lock:
            return self._named(name)

    def set_pinned(self, name: str, pinned: bool) -> Entry:
        """Raises UnknownAdapter."""
        with self._lock:
            entry = replace(self._named(name), pinned=pinned)
            self._put(entry)
            return entry

    def pinned(self, *, beside: str | None = None) -> set[AdapterId]:
        """The ids that a name pins, one name left out of account."""
        with self._lock:
            return {self._entries[name].adapter_id for name in self._pinned if name != beside}

    def hold(
        self, model: str | None, count: int = 1, *, check: Check = lambda entry: None
    ) -> AdapterId | None:
        """The adapter that a request means, held for ``count`` sequences; None is the base.

        No other adapter can get the name between ``check`` and the hold. Raises UnknownModel, and
        what ``check`` raises; then nothing is held.
        """
        with self._lock:
            entry = self._find(model)
            check(entry)
            if entry is None:
                return None
            self._in_flight[entry.adapter_id] += count
            return entry.adapter_id

    def id_of(self, model: str | None) -> AdapterId | None:
        """The adapter that a name means at this moment; None is the base. Raises UnknownModel."""
        with self._lock:
            entry = self._find(model)
            return None if entry is None else entry.adapter_id

    def release(self, adapter_id: AdapterId, count: int = 1) -> list[AdapterId]:
        """Sequences that held an adapter have ended."""
        with self._lock:
            self._in_flight[adapter_id] -= count
            assert self._in_flight[adapter_id] >= 0, "released more often than held"
            if not self._in_flight[adapter_id]:
                del self._in_flight[adapter_id]
            return self._unheld(adapter_id)

    def held(self) -> set[AdapterId]:
        """The ids that a name or a sequence holds."""
        with self._lock:
            return self._names.keys() | self._in_flight.keys()

    def names_of(self, adapter_ids: Collection[AdapterId]) -> list[str]:
        """All names that mean one of these adapters now, in the order of the alphabet."""
        with self._lock:
            return sorted(name for a in adapter_ids for name in self._names.get(a, ()))

    def in_flight(self, adapter_id: AdapterId) -> int:
        """Sequences that run or wait on an adapter."""
        return self._in_flight[adapter_id]

    def _named(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownAdapter(name)
        return self._entries[name]

    def _find(self, model: str | None) -> Entry | None:
        if model is None or model == self.base_name:
            return None
        if model not in self._entries:
            raise UnknownModel(model)
        return self._entries[model]

    def _unheld(self, adapter_id: AdapterId) -> list[AdapterId]:
        is_held = self._in_flight[adapter_id] or adapter_id in self._names
        return [] if is_held else [adapter_id]

    def _put(self, entry: Entry) -> None:
        """In the place of what had the name, if something did."""
        old = self._entries.get(entry.name)
        if old is not None:
            self._untie(old)
        self._entries[entry.name] = entry
        self._names[entry.adapter_id].add(entry.name)
        if entry.pinned:
            self._pinned.add(entry.name)

    def _untie(self, entry: Entry) -> None:
        """Its name stands for nothing now."""
        self._pinned.discard(entry.name)
        names = self._names[entry.adapter_id]
        names.remove(entry.name)
        if not names:
            del self._names[entry.adapter_id]
