"""Adapters come, change and go while steps run, and the registry is kept in step with them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from loramux.adapters.catalog import Catalog, Entry
from loramux.adapters.registry import Record, Registry
from loramux.adapters.sources import lasting_source
from loramux.engine.adapters import AdapterReader
from loramux.engine.core import EngineCore
from loramux.engine.languages import Languages
from loramux.errors import AdapterError, RegistryUnusable
from loramux.types import AdapterId, AdapterInfo, SourceRules

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_READS = 8
"""Adapters that are fetched and read at once; more of them wait."""


class Call(Protocol):
    """Runs a command in the engine's thread; a LoramuxError means that nothing has changed."""

    async def __call__(self, command: Callable[[], T]) -> T: ...


class AdapterAdmin:
    """Loads, pins and removes adapters, by the event loop's side of an engine.

    With a registry, a change is checked, then recorded, then made, and one at a time: nothing can
    come between that would have it refused after it is recorded. Should it fail all the same, the
    record is put back. Names that are ``reserved``, those of the command line, stand outside: the
    registry is neither read nor written for them.
    """

    def __init__(
        self,
        core: EngineCore,
        catalog: Catalog,
        reader: AdapterReader,
        languages: Languages,
        call: Call,
        *,
        registry: Registry | None,
        reserved: Collection[str],
    ) -> None:
        self._core = core
        self._catalog = catalog
        self._reader = reader
        self._languages = languages
        self._call = call
        self._registry = registry
        self._reserved = frozenset(reserved)
        self._reading = asyncio.Semaphore(_MAX_READS)
        self._changing = asyncio.Lock()
        self._learning: dict[AdapterId, asyncio.Task[None]] = {}

    async def restore(self) -> None:
        """Give all names of the registry, without reading an adapter. Raises RegistryUnusable."""
        if self._registry is None:
            return
        records = await in_a_thread(self._registry.records)
        known = [record for record in records if record.name not in self._reserved]
        await self._call(lambda: self._core.adapters.restore(known))
        log.info("registry %s: %d adapters", self._registry.path, len(records))

    async def prepare(self, model: str | None) -> None:
        """Have what the tokens of a request are checked and made with: the name, the tokenizer.

        A name that is not known here may be in the registry by now. Raises AdapterError.
        """
        if self._registry is None:
            return
        entry = await self._find(model)
        if entry is None or entry.vocab_size is None:
            return
        if entry.adapter_id not in self._languages.known():
            await self._learn(entry)

    async def load(
        self,
        name: str,
        source: str,
        *,
        load_inplace: bool,
        pinned: bool,
        rules: SourceRules | None,
    ) -> AdapterInfo:
        """Read, check and name an adapter. Raises AdapterError."""
        self._catalog.check_name(name, replace=load_inplace)
        async with self._reading:
            incoming = await in_a_thread(lambda: self._reader.read(name, source, rules))
        prepared = incoming.prepared

        def check() -> None:
            self._core.adapters.check_addition(name, prepared, pinned=pinned, replace=load_inplace)

        def make() -> AdapterInfo:
            return self._core.register(
                name, source, incoming, pinned=pinned, replace=load_inplace, rules=rules
            )

        def write(registry: Registry) -> Record | None:
            lasting, lasting_rules = lasting_source(source, rules)
            record = Record(
                name=name,
                adapter_id=prepared.adapter_id,
                source=lasting,
                rules=lasting_rules,
                pinned=pinned,
                num_bytes=prepared.num_bytes,
                max_rank=prepared.max_rank,
                vocab_size=prepared.vocab_size,
                warnings=prepared.warnings,
            )
            return registry.put(record, replace=load_inplace)

        return await self._change(name, check, write, make)

    async def unload(self, name: str) -> None:
        """Take a name away. Raises UnknownAdapter or RegistryUnusable."""
        await self._find(name)
        await self._change(
            name,
            lambda: self._catalog.entry(name),
            lambda registry: registry.remove(name),
            lambda: self._core.adapters.unregister(name),
        )

    async def pin(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Pin or unpin. Raises UnknownAdapter, AdapterRefused or RegistryUnusable."""
        await self._find(name)
        return await self._change(
            name,
            lambda: self._core.adapters.check_pin(name, pinned),
            lambda registry: registry.set_pinned(name, pinned),
            lambda: self._core.adapters.set_pinned(name, pinned),
        )

    async def _find(self, name: str | None) -> Entry | None:
        """The adapter that a name means here, or that the registry knows by it and is now served.

        None is the base, and a name that nobody knows.
        """
        entry = self._catalog.find(name)
        if entry is not None or self._registry is None or name is None or self._is_settled(name):
            return entry
        registry = self._registry
        async with self._changing:  # a name that is being removed must not come back
            record = await in_a_thread(lambda: registry.find(name))
            if record is not None:
                await self._call(lambda: self._adopt(record))
        return self._catalog.find(name)

    def _adopt(self, record: Record) -> None:
        if self._catalog.find(record.name) is None:  # else another request was first
            self._core.adapters.adopt(record)
            log.info("adapter %r taken in from the registry", record.name)

    def _is_settled(self, name: str) -> bool:
        """Whether the registry has nothing to say of a name."""
        return name == self._catalog.base_name or name in self._reserved

    async def _learn(self, entry: Entry) -> None:
        """Read an adapter for its tokenizer, once for all that wait for it."""
        adapter_id = entry.adapter_id
        task = self._learning.get(adapter_id)
        if task is None:
            task = asyncio.create_task(self._read_again(adapter_id))
            self._learning[adapter_id] = task
            task.add_done_callback(lambda _: self._learning.pop(adapter_id))
        await asyncio.shield(task)

    async def _read_again(self, adapter_id: AdapterId) -> None:
        origin = await self._call(lambda: self._core.adapters.origin_of(adapter_id))
        if origin is None:
            return  # nobody holds it any more
        try:
            async with self._reading:
                incoming = await in_a_thread(
                    lambda: self._reader.read(origin.name, origin.source, origin.rules)
                )
            await self._call(lambda: self._core.learn(origin, incoming))
        except AdapterError as problem:
            error = str(problem)
            await self._call(lambda: self._core.adapters.note_failed_read(adapter_id, error))
            raise

    async def _change(
        self,
        name: str,
        check: Callable[[], object],
        write: Callable[[Registry], Record | None],
        make: Callable[[], T],
    ) -> T:
        """Make a change that the registry records, if there is one and the name is no reserved one.

        ``write`` gives the record before. A caller that is cancelled leaves no half of it.
        """
        registry = self._registry
        if registry is None or name in self._reserved:
            return await self._call(make)
        return await asyncio.shield(self._recorded(registry, name, check, write, make))

    async def _recorded(
        self,
        registry: Registry,
        name: str,
        check: Callable[[], object],
        write: Callable[[Registry], Record | None],
        make: Callable[[], T],
    ) -> T:
        async with self._changing:
            await self._call(check)
            before = await in_a_thread(lambda: write(registry))
            try:
                return await self._call(make)
            except BaseException:
                with contextlib.suppress(RegistryUnusable):
                    await in_a_thread(lambda: registry.put_back(name, before))
                raise


async def in_a_thread(function: Callable[[], T]) -> T:
    """Run ``function`` in a thread of its own.

    A download may take long. The threads of ``asyncio.to_thread`` are few and tokenize prompts, and
    the end of the process waits for them.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="loramux-adapter", daemon=True).start()
    return await asyncio.wrap_future(future)
