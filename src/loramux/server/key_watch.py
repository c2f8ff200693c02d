"""Reads the file of keys again when it has changed, while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from loramux.errors import ConfigError
from loramux.server.key_file import keys_path, load_keys
from loramux.server.keys import Key, Keyring

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


@asynccontextmanager
async def watching_keys(
    keyring: Keyring, path: str | None, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Keep ``keyring`` as the file is that ``read_keys`` has made it of, if there is one.

    Changes are found within two seconds, and at once on SIGHUP, which ends the process where there
    is no file. To be entered in the main thread.
    """
    place = keys_path(path, environ)
    # What a pipe held cannot be read again.
    if place is None or Path(place).expanduser().is_fifo():
        yield
        return
    watch = KeyWatch(keyring, place, environ)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, watch.ask)
    watching = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


_State = tuple[int, ...] | None
"""What changes with a file; None for one that cannot be looked at."""


class KeyWatch:
    """Compares a file with what it was. All that touches the disk runs in other threads."""

    def __init__(self, keyring: Keyring, path: str, environ: Mapping[str, str]) -> None:
        self._keyring = keyring
        self._path = path
        self._environ = environ
        self._asked = asyncio.Event()
        # Unlike any state: a change since the server has read the file itself is found.
        self._read: _State = ()
        self._seen: _State = ()

    def ask(self) -> None:
        """Have the file read now, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Look at the file until this is cancelled."""
        while True:
            await self.look()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                pass

    async def look(self) -> None:
        """Read the file if it was asked for, or has changed and is as it was at the last look.

        Not at once: a file that somebody is writing may hold half of its keys.
        """
        asked = self._asked.is_set()
        self._asked.clear()
        now = await asyncio.to_thread(_state_of, self._path)
        has_settled, self._seen = now == self._seen, now
        if asked or (has_settled and now != self._read):
            self._read = now
            await self._replace(asked=asked)

    async def _replace(self, *, asked: bool) -> None:
        try:
            keys = await asyncio.to_thread(load_keys, self._path, self._environ)
        except ConfigError as error:
            self._keyring.note_failure()
            logger.error("%s. The keys that were read before stay in force", error)
            return
        changes = _changes(self._keyring.keys, keys)
        self._keyring.replace(keys)
        if changes or asked:
            logger.info("keys have been read again: %s", "; ".join(changes) or "nothing is new")


def _state_of(path: str) -> _State:
    """That of the file which a link leads to."""
    try:
        found = os.stat(Path(path).expanduser())
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _changes(before: Iterable[Key], after: Iterable[Key]) -> list[str]:
    """What is new about the keys, by their names."""
    old, new = ({key.name: key for key in keys} for keys in (before, after))
    groups = {
        "added": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    return [f"{what} {', '.join(names)}" for what, names in groups.items() if names]
