"""How large the arena is where nobody has said it, by what is free and how large adapters are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from loramux.adapters.formats.reader import check_adapter
from loramux.adapters.spec import BaseLayout
from loramux.lora.weights import packed_bytes

log = logging.getLogger(__name__)

_SHARE = 0.5
"""Of the memory that is free beside the base, what the arena takes at most."""

_MEMORY_INFO = Path("/proc/meminfo")


class KnownAdapter(NamedTuple):
    """One that is to be served from the start on."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Arena:
    """The size of an arena in bytes."""

    num_bytes: int
    slot_bytes: int
    """What one slot more would add; 0 where the size does not hang on the slots."""


def default_arena(
    num_slots: int, plain_bytes: int, largest: KnownAdapter | None, free_bytes: int | None
) -> Arena:
    """Room for as many adapters as there are slots, each of ``plain_bytes`` or as large as the
    largest that is known; but no more than a share of what is free, if the system says that.

    With less than all that, the log says what would do. An adapter that does not even fit alone is
    refused at its load, with the size that it needs.
    """
    slot_bytes, what = plain_bytes, "of usual size"
    if largest is not None and largest.num_bytes > plain_bytes:
        slot_bytes, what = largest.num_bytes, f"as large as {largest.name!r}"
    wanted = num_slots * slot_bytes
    if free_bytes is None or wanted <= _SHARE * free_bytes:
        return Arena(wanted, slot_bytes)
    room = int(_SHARE * free_bytes)
    log.warning(
        f"the device cache has {room:,} bytes, {_SHARE:.0%} of the memory that is free, and "
        f"{num_slots} adapters {what} need {wanted:,}: start with --device-cache {wanted}, or with "
        f"--max-loras {max(1, room // slot_bytes)}"
    )
    return Arena(room, 0)


def size_of(
    name: str,
    directory: Path,
    base: BaseLayout,
    dtype: torch.dtype,
    *,
    max_rank: int,
    lenient: bool,
) -> int:
    """Bytes that an adapter takes in every tier, at most; its numbers are not read.

    Raises AdapterRefused as ``read_adapter`` does.
    """
    checked = check_adapter(name, directory, base, max_rank=max_rank, lenient=lenient)
    return packed_bytes(checked.spec, base, dtype)


def free_memory(device: torch.device) -> int | None:
    """Bytes of a device's memory that nobody uses; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = _MEMORY_INFO.read_text().splitlines()
    except OSError:
        return None
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(size) * 1024 for size in kilobytes), None)
