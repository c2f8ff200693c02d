"""The life of an adapter in the engine: named, held by requests, freed when nobody holds it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from loramux.adapter_weights import AdapterWeights
from loramux.adapters.catalog import Catalog, Entry
from loramux.adapters.registry import Record
from loramux.adapters.residency import Residency, Room
from loramux.adapters.sources import AdapterSources, shown_source
from loramux.adapters.spec import PreparedAdapter
from loramux.engine.interface import Worker
from loramux.engine.languages import Language, Languages
from loramux.engine.origins import Origin
from loramux.errors import AdapterError, AdapterRefused
from loramux.scheduling.tally import Tally
from loramux.types import AdapterId, AdapterInfo, SourceRules

log = logging.getLogger(__name__)


class IncomingAdapter(NamedTuple):
    """An adapter that has been read and has no name yet."""

    prepared: PreparedAdapter
    language: Language | None = None
    """Where it has more tokens than the base."""
    read_seconds: float = 0.0
    """What finding, fetching, reading and checking it took."""


class AdapterDesk:
    """Keeps catalog, residency, languages and worker in step. Called from the engine's thread."""

    def __init__(
        self,
        catalog: Catalog,
        residency: Residency,
        worker: Worker,
        languages: Languages,
        weights: AdapterWeights | None,
    ) -> None:
        """``weights``: of the adapters' shares, where they have any."""
        self._catalog = catalog
        self._residency = residency
        self._worker = worker
        self._languages = languages
        self._weights = weights
        self._origins: dict[AdapterId, Origin] = {}
        self._last_used: dict[AdapterId, float] = {}
        self._last_errors: dict[AdapterId, str] = {}
        self.reads = Tally()
        self.num_host_loads = 0

    def register(
        self,
        name: str,
        source: str,
        incoming: IncomingAdapter,
        *,
        pinned: bool,
        replace: bool,
        in_use: Collection[AdapterId],
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        """Give an adapter that has been read a name. It stays in host memory if there is room.

        Adapters ``in_use`` make none; ``rules`` bound its source whenever it is fetched again.

        Raises AdapterExists, or AdapterRefused if it could never have a slot; then nothing changes.
        """
        prepared = incoming.prepared
        adapter_id = prepared.adapter_id
        self.check_addition(name, prepared, pinned=pinned, replace=replace)
        if self._size_is_new(prepared):
            self._residency.add(adapter_id, prepared.num_bytes)
        if self._residency.lacks_copy(adapter_id) and self._make_room(adapter_id, in_use):
            self._keep(prepared)
        self._note_read(adapter_id, incoming)
        entry = Entry(
            name=name,
            adapter_id=adapter_id,
            source=shown_source(source),
            num_bytes=prepared.num_bytes,
            max_rank=prepared.max_rank,
            pinned=pinned,
            warnings=prepared.warnings,
            vocab_size=prepared.vocab_size,
        )
        self._give_name(entry, Origin(adapter_id, name, source, rules), replace=replace)
        _log_loaded(entry)
        return self._describe(entry)

    def check_addition(
        self, name: str, prepared: PreparedAdapter, *, pinned: bool, replace: bool
    ) -> None:
        """Raises what ``register`` would raise."""
        self._catalog.check_name(name, replace=replace)
        if self._size_is_new(prepared) and prepared.adapter_id in self._residency.host.fetching:
            raise AdapterRefused(
                name, ["it is being read with the size of the registry, which is wrong: try again"]
            )
        self._check_room(name, prepared.adapter_id, prepared.num_bytes, pinned=pinned)

    def adopt(self, record: Record) -> AdapterInfo:
        """Give an adapter a name that has not been read: its source has it.

        Raises AdapterExists or AdapterRefused as ``register`` does.
        """
        adapter_id, name = record.adapter_id, record.name
        self._catalog.check_name(name, replace=False)
        self._check_room(name, adapter_id, record.num_bytes, pinned=record.pinned)
        if not self._residency.knows(adapter_id):
            self._residency.add(adapter_id, record.num_bytes)
        entry = Entry(
            name=name,
            adapter_id=adapter_id,
            source=shown_source(record.source),
            num_bytes=record.num_bytes,
            max_rank=record.max_rank,
            pinned=record.pinned,
            warnings=record.warnings,
            vocab_size=record.vocab_size,
        )
        self._give_name(entry, Origin(adapter_id, name, record.source, record.rules), replace=False)
        return self._describe(entry)

    def restore(self, records: Iterable[Record]) -> None:
        """Adopt what can be; a pin for which there is no room any more is left out."""
        for record in records:
            try:
                try:
                    self.adopt(record)
                except AdapterRefused as refusal:
                    if not record.pinned:
                        raise
                    self.adopt(replace(record, pinned=False))
                    log.warning("served without its pin: %s", refusal)
            except AdapterError as problem:
                log.warning("in the registry, but not served: %s", problem)

    def origin_of(self, adapter_id: AdapterId) -> Origin | None:
        """None: nobody holds the adapter any more."""
        return self._origins.get(adapter_id)

    def check_pin(self, name: str, pinned: bool) -> None:
        """Raises what ``set_pinned`` would raise."""
        entry = self._catalog.entry(name)
        self._check_room(name, entry.adapter_id, entry.num_bytes, pinned=pinned)

    def set_pinned(self, name: str, pinned: bool) -> AdapterInfo:
        """Pin or unpin. Raises UnknownAdapter, or AdapterRefused if others could not run then."""
        self.check_pin(name, pinned)
        entry = self._catalog.set_pinned(name, pinned)
        self._settle_pins()
        log.info("adapter %r %s", name, "pinned" if pinned else "unpinned")
        return self._describe(entry)

    def unregister(self, name: str) -> None:
        """Take a name away; running requests finish. Raises UnknownAdapter."""
        unheld = self._catalog.remove(name)
        self._settle_pins()
        self._let_go(unheld)
        log.info("adapter %r unloaded", name)

    def release(self, adapter_id: AdapterId | None) -> None:
        """A sequence that held the adapter has ended."""
        if adapter_id is not None:
            self.note_use(adapter_id)
            self._let_go(self._catalog.release(adapter_id))

    def note_use(self, adapter_id: AdapterId) -> None:
        """A sequence that holds the adapter begins or ends."""
        self._last_used[adapter_id] = time.time()

    def names_of(self, adapter_ids: Collection[AdapterId]) -> tuple[str, ...]:
        """The names of adapters; for any thread."""
        return tuple(self._catalog.names_of(adapter_ids))

    def infos(self) -> list[AdapterInfo]:
        return [self._describe(entry) for entry in self._catalog]

    def check(self) -> None:
        """Assert that residency, catalog and languages know of the same adapters and pins."""
        known = self._residency.known()
        assert known == self._catalog.held(), "an adapter leaked or is lost"
        assert known == self._origins.keys()
        assert self._languages.known() <= known, "a tokenizer leaked"
        assert self._residency.pinned == {e.adapter_id for e in self._catalog if e.pinned}

    def begin_fetch(self, adapter_id: AdapterId, in_use: Collection[AdapterId]) -> Origin | None:
        """Make room for an adapter's copy; where it is to be fetched. None if it must wait."""
        if not self._make_room(adapter_id, in_use):
            return None
        return self._origins[adapter_id]

    def fetched(self, origin: Origin, incoming: IncomingAdapter) -> str | None:
        """The copy of an adapter is there; what is wrong with it, if it is no copy of that one."""
        if origin.adapter_id not in self._residency.host.fetching:
            return None  # nobody holds the adapter any more
        problem = self._mismatch(origin, incoming.prepared)
        if problem is not None:
            self.fetch_failed(origin, problem)
            return problem
        self._note_read(origin.adapter_id, incoming)
        self._keep(incoming.prepared)
        return None

    def learn(
        self, origin: Origin, incoming: IncomingAdapter, in_use: Collection[AdapterId]
    ) -> None:
        """Take the tokenizer of an adapter that had not been read, and its copy if there is room.

        Raises AdapterRefused for what is not that adapter.
        """
        adapter_id = origin.adapter_id
        if not self._residency.knows(adapter_id):
            return  # nobody holds it any more
        problem = self._mismatch(origin, incoming.prepared)
        if problem is not None:
            raise AdapterRefused(origin.name, [problem])
        self._note_read(adapter_id, incoming)
        if self._residency.lacks_copy(adapter_id) and self._make_room(adapter_id, in_use):
            self._keep(incoming.prepared)

    def note_failed_read(self, adapter_id: AdapterId, error: str) -> None:
        """An adapter could not be read again."""
        if self._residency.knows(adapter_id):
            self._last_errors[adapter_id] = error

    def _mismatch(self, origin: Origin, prepared: PreparedAdapter) -> str | None:
        """Why what has been read is not the adapter that was to be read."""
        shown, remedy = shown_source(origin.source), "load it again with load_inplace"
        if prepared.adapter_id != origin.adapter_id:
            return f"{shown} holds another adapter now than when it was loaded: {remedy}"
        expected = self._residency.bytes_of(origin.adapter_id)
        if prepared.num_bytes != expected:
            return (
                f"{shown} takes {prepared.num_bytes:,} bytes, not {expected:,} as when it was "
                f"loaded: {remedy}"
            )
        return None

    def _note_read(self, adapter_id: AdapterId, incoming: IncomingAdapter) -> None:
        self.reads.observe(incoming.read_seconds)
        self._last_errors.pop(adapter_id, None)
        self._learn(adapter_id, incoming.language)

    def _learn(self, adapter_id: AdapterId, language: Language | None) -> None:
        """Requests may have tokens of the tokenizer that is there: it stays the same."""
        if language is not None and adapter_id not in self._languages.known():
            self._languages.add(adapter_id, language)

    def _give_name(self, entry: Entry, origin: Origin, *, replace: bool) -> None:
        self._origins[entry.adapter_id] = origin
        unheld = self._catalog.add(entry, replace=replace)
        self._settle_pins()
        self._let_go(unheld)

    def fetch_failed(self, origin: Origin, error: str) -> None:
        """No copy of an adapter will come."""
        if origin.adapter_id in self._residency.host.fetching:
            self._residency.host.failed(origin.adapter_id)
            self._last_errors[origin.adapter_id] = error

    def _size_is_new(self, prepared: PreparedAdapter) -> bool:
        """Whether an adapter is not known, or with a size that was recorded and never seen."""
        residency, adapter_id = self._residency, prepared.adapter_id
        if not residency.knows(adapter_id):
            return True
        return residency.bytes_of(adapter_id) != prepared.num_bytes

    def _check_room(
        self, name: str, adapter_id: AdapterId, num_bytes: int, *, pinned: bool
    ) -> None:
        """Raises AdapterRefused if it, or another one, could never have a slot."""
        pins = self._catalog.pinned(beside=name)
        if pinned:
            pins.add(adapter_id)
        objection = self._residency.objection(adapter_id, num_bytes, pins)
        if objection is not None:
            raise AdapterRefused(name, [objection])

    def _make_room(self, adapter_id: AdapterId, in_use: Collection[AdapterId]) -> bool:
        room = self._residency.make_host_room(adapter_id, in_use)
        if room is not None:
            self._give_up(room)
        return room is not None

    def _keep(self, prepared: PreparedAdapter) -> None:
        self._worker.install(prepared)
        self.num_host_loads += 1
        self._residency.host.arrived(prepared.adapter_id)

    def _give_up(self, room: Room) -> None:
        if room.orders:
            self._worker.apply(room.orders)
        for adapter_id in room.dropped:
            self._worker.drop(adapter_id)

    def _let_go(self, adapter_ids: Iterable[AdapterId]) -> None:
        """Free adapters that no name and no request holds, in every tier."""
        for adapter_id in adapter_ids:
            self._give_up(self._residency.forget(adapter_id))
            del self._origins[adapter_id]
            self._last_used.pop(adapter_id, None)
            self._last_errors.pop(adapter_id, None)
            self._languages.forget(adapter_id)

    def _settle_pins(self) -> None:
        """An id is pinned while one of its names is, not while requests alone hold it."""
        self._residency.set_pinned(self._catalog.pinned())

    def _describe(self, entry: Entry) -> AdapterInfo:
        return AdapterInfo(
            name=entry.name,
            adapter_id=entry.adapter_id,
            source=entry.source,
            num_bytes=entry.num_bytes,
            max_rank=entry.max_rank,
            pinned=entry.pinned,
            slot=self._residency.find_slot(entry.adapter_id),
            tier=self._residency.tier_of(entry.adapter_id),
            in_flight=self._catalog.in_flight(entry.adapter_id),
            last_used=self._last_used.get(entry.adapter_id),
            last_error=self._last_errors.get(entry.adapter_id),
            warnings=entry.warnings,
            vocab_size=entry.vocab_size,
            weight=None if self._weights is None else self._weights.of(entry.name),
        )


@dataclass(frozen=True)
class AdapterReader:
    """Finds, reads and checks adapters, in any thread."""

    worker: Worker
    sources: AdapterSources
    languages: Languages

    def read(self, name: str, source: str, rules: SourceRules | None = None) -> IncomingAdapter:
        """Raises AdapterError."""
        began = time.perf_counter()
        prepared, language = self._read(name, source, rules)
        return IncomingAdapter(prepared, language, time.perf_counter() - began)

    def _read(
        self, name: str, source: str, rules: SourceRules | None
    ) -> tuple[PreparedAdapter, Language | None]:
        with self.sources.open(name, source, rules) as directory:
            prepared = self.worker.read_adapter(name, directory)
            if prepared.vocab_size is None:
                return prepared, None
            language = self.languages.read(name, directory, prepared.vocab_size)
        prepared = replace(
            prepared,
            adapter_id=_speaking(prepared.adapter_id, language),
            warnings=(*prepared.warnings, *language.warnings),
        )
        return prepared, language


def _speaking(adapter_id: AdapterId, language: Language) -> AdapterId:
    """The id of an adapter with a tokenizer of its own: with another one it is another adapter."""
    if not language.fingerprint:
        return adapter_id
    return AdapterId(sha256(f"{adapter_id} {language.fingerprint}".encode()).hexdigest())


def _log_loaded(entry: Entry) -> None:
    log.info(
        "adapter %r loaded from %s: id %s, rank %d, %.1f MB",
        entry.name,
        entry.source,
        entry.adapter_id[:12],
        entry.max_rank,
        entry.num_bytes / 1e6,
    )
    for warning in entry.warnings:
        log.warning("adapter %r: %s", entry.name, warning)
