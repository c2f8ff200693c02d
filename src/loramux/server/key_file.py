"""Reads keys from a file and the environment, and refuses what is not clear about them.

No message holds a key, nor a value that may be one.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import stat
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loramux.errors import ConfigError
from loramux.server.keys import Key, Keyring
from loramux.server.limits import Clock, Limits
from loramux.types import MAX_PRIORITY, MIN_PRIORITY

logger = logging.getLogger(__name__)

FILE_VARIABLE = "LORAMUX_KEYS"
API_KEY_VARIABLE = "LORAMUX_API_KEY"
ADMIN_KEY_VARIABLE = "LORAMUX_ADMIN_KEY"

_LIMITS = ("requests_per_second", "tokens_per_minute", "max_in_flight")
_REQUESTS = ("adapters", "min_priority", *_LIMITS)
"""Fields that bound requests to models."""
FIELDS = ("name", "key", "sha256", "admin", "infer", *_REQUESTS)
"""Of a key in the file."""


def read_keys(
    path: str | None, environ: Mapping[str, str], *, clock: Clock = time.monotonic
) -> Keyring:
    """The keys of the file at ``path`` or in ``LORAMUX_KEYS``, and of two more variables.

    Raises ConfigError for a file that cannot be read or that everyone can, and for a key that is
    written wrongly, which it names.
    """
    path = keys_path(path, environ)
    keys = load_keys(path, environ)
    # A file guards requests even when no key in it may send any: taking out the last tenant must
    # not let everyone in.
    guarded = path is not None or any(key.infer for key in keys)
    if keys:
        logger.info("keys: %s", ", ".join(map(_described, keys)))
    return Keyring(keys, open_inference=not guarded, clock=clock)


def keys_path(path: str | None, environ: Mapping[str, str]) -> str | None:
    """Where the file of keys is, if there is one: at ``path``, or else as the variable says."""
    return environ.get(FILE_VARIABLE) if path is None else path


def load_keys(path: str | None, environ: Mapping[str, str]) -> list[Key]:
    """Those of the file, if there is one, and of the two variables. Raises as ``read_keys``."""
    keys = [] if path is None else _read_file(path)
    for variable, admin in ((API_KEY_VARIABLE, False), (ADMIN_KEY_VARIABLE, True)):
        if variable in environ:
            digest = _digest_of(environ[variable], variable)
            keys.append(Key(name=variable, digest=digest, admin=admin, infer=not admin))
    _check_distinct(keys)
    return keys


def _described(key: Key) -> str:
    if not key.admin:
        return key.name
    return f"{key.name} (admin, may infer)" if key.infer else f"{key.name} (admin)"


def _read_file(path: str) -> list[Key]:
    place = f"keys file {path!r}"
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        raise ConfigError(f"{place} cannot be read: {error}") from error
    except ValueError as error:
        # The place alone: the parser quotes what it stumbled over.
        where = re.search(r" \(at [^()]*\)$", str(error))
        raise ConfigError(f"{place} is no TOML{where[0] if where else ''}: correct it") from None
    tables = content.pop("key", None)
    if content:
        raise ConfigError(f"{place} holds more than keys: write each one under [[key]]")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place} holds no keys: write each one under [[key]]")
    keys = [_read_key(table, f"{place}, key {i}") for i, table in enumerate(tables, 1)]
    _check_mode(mode, place, has_plain_keys=any("key" in table for table in tables))
    return keys


def _check_mode(mode: int, place: str, *, has_plain_keys: bool) -> None:
    # The group may: secrets of Kubernetes and credentials of systemd come that way.
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"{place} can be written by everyone, who could let themselves in: chmod o-w it"
        )
    if mode & stat.S_IROTH and has_plain_keys:
        raise ConfigError(
            f"{place} holds keys in plain text and everyone may read it: chmod 600 it, or write "
            "sha256 in place of key"
        )


def _read_key(table: dict[str, Any], place: str) -> Key:
    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{place}: name must be up to 64 letters, digits, '.', '_' or '-', the first a letter "
            "or digit"
        )
    digest = _read_digest(table, place)
    if hashlib.sha256(name.encode()).digest() == digest:
        raise ConfigError(f"{place}: the name is the key itself, and names are shown: take another")
    place = f"{place} ({name})"
    if unknown := sorted(set(table) - set(FIELDS)):
        # What does not look like the name of a field may be a key in the wrong place.
        shown = f" {unknown[0]}" if re.fullmatch(r"[a-z_-]{1,32}", unknown[0]) else ""
        raise ConfigError(f"{place} has an unknown field{shown}: use {', '.join(FIELDS)}")
    admin = _boolean(table, "admin", place, default=False)
    infer = _boolean(table, "infer", place, default=not admin)
    if not (admin or infer):
        raise ConfigError(f"{place} may do nothing: leave infer out, or set admin = true")
    idle = [field for field in _REQUESTS if field in table]
    if idle and not infer:
        raise ConfigError(
            f"{place}: {idle[0]} bounds requests to models, which an admin key may not send: leave "
            "it out, or set infer = true"
        )
    limits = Limits(
        requests_per_second=_number(table, "requests_per_second", place),
        tokens_per_minute=_count(table, "tokens_per_minute", place),
        max_in_flight=_count(table, "max_in_flight", place),
    )
    return Key(
        name=name,
        digest=digest,
        admin=admin,
        infer=infer,
        adapters=_patterns(table, place),
        min_priority=_priority(table, place),
        limits=limits,
    )


def _read_digest(table: dict[str, Any], place: str) -> bytes:
    if ("key" in table) == ("sha256" in table):
        raise ConfigError(f"{place}: give either key, or sha256 with the key's digest")
    if "key" in table:
        return _digest_of(table["key"], f"{place}: key")
    value = table["sha256"]
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", value):
        raise ConfigError(
            f'{place}: sha256 must be 64 hexadecimal digits: printf %s "$KEY" | sha256sum'
        )
    return bytes.fromhex(value)


def _digest_of(key: object, what: str) -> bytes:
    """The digest of a plain key, if it can stand in an HTTP header as it is."""
    if not isinstance(key, str) or not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(
            f"{what} must be visible ASCII characters without spaces, and not empty: make one with "
            "openssl rand -hex 32"
        )
    return hashlib.sha256(key.encode()).digest()


def _patterns(table: dict[str, Any], place: str) -> tuple[str, ...] | None:
    if "adapters" not in table:
        return None
    value = table["adapters"]
    if not isinstance(value, list) or not value or not all(_is_name(item) for item in value):
        raise ConfigError(
            f'{place}: adapters must be a list of names or patterns, such as ["tenant-a-*"]; leave '
            "it out to allow all"
        )
    return tuple(value)


def _priority(table: dict[str, Any], place: str) -> int | None:
    value = table.get("min_priority")
    if value is None:
        return None
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        raise ConfigError(
            f"{place}: min_priority must be a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}"
        )
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _boolean(table: dict[str, Any], field: str, place: str, *, default: bool) -> bool:
    value = table.get(field, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{place}: {field} must be true or false")
    return value


def _number(table: dict[str, Any], field: str, place: str) -> float | None:
    value = table.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{place}: {field} must be a number above 0")
    return value


def _count(table: dict[str, Any], field: str, place: str) -> int | None:
    value = table.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{place}: {field} must be a whole number, at least 1")
    return value


def _check_distinct(keys: list[Key]) -> None:
    names: set[str] = set()
    by_digest: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two keys have the name {key.name!r}: rename one")
        names.add(key.name)
        other = by_digest.setdefault(key.digest, key.name)
        if other != key.name:
            raise ConfigError(f"the keys {other!r} and {key.name!r} are the same: make a new one")
