"""The clock of ``loramux tune``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loramux.ops.tiles import LONG_FROM, SHORT_ROWS, Tiles, block_rows_of, choose_tiles
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import Shape
from loramux.worker.tile_timer import SiteCopies, Timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def copies(device: torch.device) -> SiteCopies:
    return SiteCopies(Shape(4096, (4096, 1024, 1024)), 16, 32, num_copies=4, device=device)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("num_rows", [32, LONG_FROM])
def test_a_launch_adds_microseconds_and_no_milliseconds(
    copies: SiteCopies, num_rows: int, few: bool
) -> None:
    timer = Timer(copies, num_rows, few=few)
    measured = timer.measure(choose_tiles(4096, block_rows_of(num_rows, few), 16, few=few))
    assert measured is not None
    assert (-5 if few else 0) < measured < 1000


def test_tiles_are_compiled_before_they_are_measured(copies: SiteCopies) -> None:
    timer = Timer(copies, 32, few=True)
    tiles = choose_tiles(4096, SHORT_ROWS, 16, few=True)
    candidates = [replace(tiles, block_k=block_k, block_n=32) for block_k in (16, 32, 64)]
    timer.prepare(candidates)
    device = torch.cuda.current_device()
    kernels = [len(kernel.device_caches[device][0]) for kernel in (shrink_kernel, expand_kernel)]
    for candidate in candidates:
        assert timer.measure(candidate) is not None
    assert kernels == [
        len(kernel.device_caches[device][0]) for kernel in (shrink_kernel, expand_kernel)
    ]


def test_tiles_without_room_have_no_times(copies: SiteCopies) -> None:
    too_large = Tiles(split_k=1, block_k=512, shrink_stages=8, shrink_ranks=16)
    timer = Timer(copies, LONG_FROM, few=True)
    assert timer.measure(too_large) is None
    assert timer.measure(Tiles(split_k=1)) is not None, "and the next ones are timed as before"


def test_tiles_that_fail_in_the_form_for_dora_have_no_times(
    copies: SiteCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Triton 3.6 in long segments, several tiles of columns and more than one stage do."""

    def fails(self: TritonOps, *arguments: object) -> None:
        raise RuntimeError("PassManager::run failed")

    timer, tiles = Timer(copies, 32, few=True), choose_tiles(4096, SHORT_ROWS, 16, few=True)
    with monkeypatch.context() as patch:
        patch.setattr(TritonOps, "lora_add_", fails)
        assert timer.measure(tiles) is None
    assert timer.measure(tiles) is not None
