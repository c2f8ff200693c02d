"""Reads adapters again in threads of its own, for requests that wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from loramux.engine.adapters import AdapterReader, IncomingAdapter
from loramux.engine.origins import Origin
from loramux.errors import AdapterError, AdapterSourceUnavailable

log = logging.getLogger(__name__)

_THREADS = 8
_RETRY_AFTER = (0.5, 2.0)
"""Seconds before a source that cannot be reached is asked again."""

Outcome = IncomingAdapter | str
"""An adapter, or why it cannot be read."""


class Fetcher:
    """Takes origins in the order in which they are wanted; several are read at once.

    Threads start when they are first needed, and do not keep a process from ending.
    """

    def __init__(
        self,
        reader: AdapterReader,
        deliver: Callable[[Origin, Outcome], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``deliver`` is called in a thread of the fetcher, once for each origin."""
        self._reader = reader
        self._deliver = deliver
        self._sleep = sleep
        self._wanted: SimpleQueue[Origin] = SimpleQueue()
        self._num_threads = 0
        self._idle = threading.Semaphore(0)

    def start(self, origins: Iterable[Origin]) -> None:
        """Read these adapters. Called from one thread."""
        for origin in origins:
            if not self._idle.acquire(blocking=False) and self._num_threads < _THREADS:
                self._num_threads += 1
                threading.Thread(target=self._run, name="loramux-fetch", daemon=True).start()
            self._wanted.put(origin)

    def _run(self) -> None:
        while True:
            origin = self._wanted.get()
            self._deliver(origin, self._fetch(origin))
            self._idle.release()

    def _fetch(self, origin: Origin) -> Outcome:
        began = time.perf_counter()
        for seconds in (*_RETRY_AFTER, None):
            try:
                found = self._reader.read(origin.name, origin.source, origin.rules)
            except AdapterSourceUnavailable as problem:
                if seconds is None:
                    return str(problem)
                log.warning("%s; asked again in %g s", problem, seconds)
                self._sleep(seconds)
            except AdapterError as problem:
                return str(problem)
            except Exception as problem:
                # A fault of ours or of a library ends the requests that wait, and no others.
                log.exception("adapter %r cannot be read", origin.name)
                return f"adapter {origin.name!r} cannot be read: {type(problem).__name__}"
            else:
                log.info("adapter %r read in %.2f s", origin.name, time.perf_counter() - began)
                return found
        raise AssertionError("the last attempt returns")
