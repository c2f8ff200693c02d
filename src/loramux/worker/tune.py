"""Searches tiles for the sites of a base on this GPU; ``worker.tile_timer`` times them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch
import triton

from loramux.config import ModelOptions
from loramux.errors import ConfigError
from loramux.model.anatomy import Anatomy, examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import load_base
from loramux.ops.tile_search import Found, TileTimer, grid_of, search
from loramux.ops.tiles import (
    FEW_ADAPTERS,
    block_rows_of,
    choose_tiles,
    launches_of,
    rank_bucket_of,
)
from loramux.ops.tuning import RANK_BUCKETS, ROW_BUCKETS, Entry, Key, Shape, Table, bucket_of
from loramux.worker.tile_timer import SiteCopies, Timer, copies_for

SHAPES = {
    "llama-1b": [(2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))],
    "llama-8b": [
        (4096, (4096, 1024, 1024)),
        (4096, (4096,)),
        (4096, (14336, 14336)),
        (14336, (4096,)),
    ],
    "llama-70b": [
        (8192, (8192, 1024, 1024)),
        (8192, (8192,)),
        (8192, (28672, 28672)),
        (28672, (8192,)),
    ],
}
"""Sites of well-known models, by name: what a base of that shape would be examined for."""

MEASURED_ROWS = {
    "up to 16": 16,
    "up to 64": 64,
    "up to 128": 128,
    "up to 1023": 512,
    "from 1024": 2048,
}
"""Rows of the step that stands for each bucket."""

Report = Callable[[Entry, float | None], None]
"""Hears of each entry as it is found, with the time of the rule's tiles. Times are None where the
GPU has no room."""


@dataclass(frozen=True)
class Cases:
    """What tiles are searched for: all shapes with all ranks, in all buckets of rows."""

    shapes: Sequence[Shape]
    ranks: Sequence[int]
    rows: Sequence[int]
    """Any that lie in the buckets."""
    num_slots: int

    @property
    def steps(self) -> list[tuple[str, bool]]:
        """Buckets of rows, each with few adapters, and with many if there can be."""
        wanted = {bucket_of(ROW_BUCKETS, num_rows) for num_rows in self.rows}
        mixes = (True, False) if self.num_slots > FEW_ADAPTERS else (True,)
        return [(name, few) for name in MEASURED_ROWS if name in wanted for few in mixes]


def tune(cases: Cases, report: Report) -> Iterator[Table]:
    """Search tiles; what was found for one shape and rank after the other. Raises ConfigError."""
    device, ranks = require_gpu(), cases.ranks
    if len({_rank_name(rank) for rank in ranks}) < len(ranks):
        raise ConfigError(
            f"of the ranks {', '.join(map(str, ranks))} some share tiles: name one each of "
            + ", ".join(RANK_BUCKETS)
        )
    found = Table(
        gpu=gpu_name(),
        date=date.today().isoformat(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
        entries=(),
    )
    for shape, rank in itertools.product(cases.shapes, ranks):
        num_copies = copies_for(shape, torch.cuda.get_device_properties(device).L2_cache_size)
        copies = SiteCopies(shape, rank, cases.num_slots, num_copies, device)
        entries = [_tune_step(copies, rows, few, report) for rows, few in cases.steps]
        yield replace(found, entries=tuple(e for e in entries if e.measured is not None))


def _tune_step(copies: SiteCopies, rows: str, few: bool, report: Report) -> Entry:
    """One kind of step over a site."""
    key = Key(copies.shape, rows, _rank_name(copies.rank), few)
    num_rows = MEASURED_ROWS[rows]
    found = find_tiles(key, copies.rank, Timer(copies, num_rows, few=few))
    entry = Entry(key, found.tiles, found.measured)
    report(entry, found.start)
    return entry


def _rank_name(rank: int) -> str:
    """The bucket that adapters of one rank run in, by the name that a table gives it."""
    return bucket_of(RANK_BUCKETS, rank_bucket_of(rank))


def find_tiles(key: Key, rank: int, timer: TileTimer) -> Found:
    """Search from the default rule's tiles."""
    block_rows = block_rows_of(MEASURED_ROWS[key.rows], key.few)
    rank_bucket = rank_bucket_of(rank)
    start = choose_tiles(key.shape.in_features, block_rows, rank_bucket, few=key.few)
    return search(start, grid_of(block_rows, rank_bucket), timer)


def gpu_name() -> str:
    """What a table calls the GPU that is here. Raises ConfigError where there is none."""
    return torch.cuda.get_device_name(require_gpu())


def require_gpu() -> torch.device:
    """Raises ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "tuning measures on an NVIDIA GPU and there is none: run it on the machine that will "
            "serve, with torch's CUDA build"
        )
    return torch.device("cuda", torch.cuda.current_device())


def shapes_named(name: str) -> list[Shape]:
    """The sites of a well-known model. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is unknown: use one of {', '.join(SHAPES)}, or BASE")
    return [Shape(in_features, sizes) for in_features, sizes in SHAPES[name]]


def shapes_of_base(path: str) -> list[Shape]:
    """The distinct sites of a base model, which is in memory only meanwhile. Raises as load_base
    and examine do."""
    base = load_base(path, ModelOptions(dtype="bfloat16"))
    shapes = shapes_of(examine(base, AttentionSeam(base.model)))
    del base
    gc.collect()
    torch.cuda.empty_cache()
    return shapes


def shapes_of(anatomy: Anatomy) -> list[Shape]:
    """The distinct launches of a model's sites, in the order in which they first come."""
    modules = anatomy.modules.shapes
    return list(
        dict.fromkeys(
            Shape(modules[members[0]].in_features, sizes)
            for members in anatomy.sites
            for sizes in launches_of([modules[member].out_features for member in members])
        )
    )
