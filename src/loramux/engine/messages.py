"""What a server's process and its engine's say to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from loramux.errors import LoramuxError
from loramux.stats import EngineStats
from loramux.types import AdapterInfo, Delta, RequestId

CODEC_KEY = "codec_key"
"""A call beside the methods of a service: the key of what ``text_of`` would give, without the
tokenizer, which is megabytes."""

CALLS = frozenset(
    {
        CODEC_KEY,
        "submit",
        "text_of",
        "load_adapter",
        "unload_adapter",
        "pin_adapter",
        "adapters",
        "stats",
    }
)
"""What the engine's process is asked for; all others are methods of ``interface.Service``."""


@dataclass(frozen=True, slots=True)
class Call:
    """To the engine: carry out one of ``CALLS``; ``Result`` or ``Error`` has the same number."""

    number: int
    method: str
    args: Sequence[Any]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine: nobody waits for the call with this number any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: stop a request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """To the engine: end all requests, then the process."""


@dataclass(frozen=True, slots=True)
class Started:
    """From the engine: it takes requests."""

    base_name: str
    max_model_len: int
    adapters: list[AdapterInfo]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class NotStarted:
    """From the engine: it cannot be built or started, and has ended."""

    error: LoramuxError


@dataclass(frozen=True, slots=True)
class Result:
    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Error:
    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Ended:
    """From the engine: its service has ended, and nothing follows."""

    failure: str


PackedDeltas = list[tuple[Any, ...]]
"""From the engine, by far the most frequent message: pickled as tuples in a twentieth of the time
that the deltas themselves would take, and that time is the steps'."""

_fields = attrgetter(*(field.name for field in fields(Delta)))


def pack(deltas: Iterable[Delta]) -> PackedDeltas:
    return [_fields(delta) for delta in deltas]


def unpack(packed: PackedDeltas) -> list[Delta]:
    return [Delta(*values) for values in packed]
