"""What every remote place of adapters can do: say which files are there, and hand out bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from loramux.adapters.formats.peft_config import CONFIG_FILE
from loramux.adapters.formats.shared_layout import LAYOUT_FILE
from loramux.adapters.formats.weight_files import WEIGHT_FILES

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
CONFIG_FILES = (CONFIG_FILE, LAYOUT_FILE)
ADAPTER_FILES = (*CONFIG_FILES, *WEIGHT_FILES, *TOKENIZER_FILES)
"""All that an adapter can consist of; nothing else is ever fetched."""

CHUNK_BYTES = 2**20


class RemoteProblem(Exception):
    """A remote adapter cannot be had; the text is fit for the user."""


class RemoteMissing(RemoteProblem):
    """There is no adapter at this place."""


class RemoteForbidden(RemoteProblem):
    """The server's rules do not allow a place that a redirect leads to."""


class RemoteUnfit(RemoteProblem):
    """What is there cannot be an adapter, or one that is too large."""


class RemoteUnavailable(RemoteProblem):
    """The place cannot be reached or does not answer as it should."""


class RemoteDenied(RemoteUnavailable):
    """The place does not let this server in."""


class TransferBroken(RemoteUnavailable):
    """A transfer ended early; what has come can be used."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as the remote describes it before it is read."""

    name: str
    """In the adapter's directory."""
    place: str
    """Where the remote itself finds it."""
    size: int | None
    version: str | None
    """Another one stands for other content; None where the remote tells none."""
    sha256: str | None = None
    resumable: bool = True
    """Whether bytes of one transfer and the rest from another are sure to fit together."""


@dataclass(frozen=True)
class Transfer:
    """The bytes of a file from ``start`` to its end."""

    start: int
    chunks: Iterator[bytes]


class Remote(Protocol):
    """One place that holds one adapter. All methods raise RemoteProblem."""

    @property
    def source(self) -> str:
        """The place in one canonical form, which the disk cache goes by."""
        ...

    @property
    def immutable(self) -> bool:
        """Whether what was once read there can never change."""
        ...

    @property
    def offline(self) -> bool:
        """Whether the user has asked, by the remote's own means, not to reach it."""
        ...

    def look(self) -> Sequence[RemoteFile]:
        """The files of the adapter as they are now, or the one archive that holds them."""
        ...

    def open(self, file: RemoteFile, start: int) -> AbstractContextManager[Transfer]:
        """Begin to read, at ``start`` or, where that cannot be had, at 0."""
        ...

    def close(self) -> None: ...


def choose(present: Collection[str]) -> list[str]:
    """Of all file names at a place, those that are read. Raises RemoteMissing."""
    weights = next((name for name in WEIGHT_FILES if name in present), None)
    if weights is None and CONFIG_FILE not in present:
        raise RemoteMissing(
            f"holds no adapter: neither {CONFIG_FILE} nor {WEIGHT_FILES[0]} is there"
        )
    others = [name for name in (*CONFIG_FILES, *TOKENIZER_FILES) if name in present]
    return others if weights is None else [*others, weights]
