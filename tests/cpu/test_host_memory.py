"""Page-locked memory for adapters, on a CPU that only pretends to lock it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from loramux.errors import ConfigError
from loramux.lora import host_memory
from loramux.lora.host_memory import HostBlock, OrdinaryMemory, PinnedMemory


class FakeRuntime:
    """Notes what is locked; no two parts of it may overlap."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.status == 0:
            assert all(
                address + num_bytes <= start or start + size <= address
                for start, size in self.locked.items()
            )
            self.locked[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(host_memory, "_runtime", lambda: fake)
    return fake


def block(size: int, value: float = 0.0) -> HostBlock:
    return HostBlock((torch.arange(size, dtype=torch.bfloat16) + value,))


def test_blocks_stand_in_the_memory_locked_at_start(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(4096)
    memory.wait()
    (start,) = runtime.locked
    kept = [memory.keep(block(500, value)) for value in (0.0, 7.0)]
    for one, value in zip(kept, (0.0, 7.0), strict=True):
        assert torch.equal(one.whole, block(500, value).whole)
        assert all(start <= p.data_ptr() < start + 4096 for p in one.pieces)
        assert all(p.data_ptr() % 16 == 0 for p in one.pieces)
    assert len(runtime.locked) == 1


def test_memory_of_a_block_is_used_again_once_nobody_holds_it(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(2048)
    first, second = memory.keep(block(512)), memory.keep(block(512))
    assert memory.num_free == 0
    place = first.pieces[0].data_ptr()
    del first
    gc.collect()
    assert memory.keep(block(512)).pieces[0].data_ptr() == place
    assert second.num_bytes == 1024
    assert memory.num_beside == 0


def test_a_block_may_stand_in_pieces() -> None:
    memory = PinnedMemory(1024)
    parts = [memory.keep(block(128, i)) for i in range(4)]
    del parts[2], parts[0]
    gc.collect()
    kept = memory.keep(block(200, 3.0))
    assert len(kept.pieces) == 2
    assert kept.num_elements == 200
    assert torch.equal(kept.whole, block(200, 3.0).whole)
    memory.check()


def test_without_room_a_block_is_locked_by_itself_until_it_goes(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(512)
    kept = memory.keep(block(1000))
    assert torch.equal(kept.whole, block(1000).whole)
    assert (memory.num_beside, len(runtime.locked)) == (1, 2)
    del kept
    gc.collect()
    assert len(runtime.locked) == 1


def test_memory_is_unlocked_when_nothing_of_it_is_held(runtime: FakeRuntime) -> None:
    memory = PinnedMemory(4096)
    kept = memory.keep(block(10))
    del memory
    gc.collect()
    assert runtime.locked, "a block is still in it"
    del kept
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_said_with_the_remedy(runtime: FakeRuntime) -> None:
    runtime.status = 2
    memory = PinnedMemory(4096)
    for use in (memory.wait, lambda: memory.keep(block(8))):
        with pytest.raises(ConfigError, match=r"4,096 bytes.*error 2.*--host-cache"):
            use()


def test_memory_that_is_not_there_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match=r"4,096 bytes.*Cannot allocate.*--host-cache"):
        PinnedMemory(4096).wait()


def test_memory_is_locked_while_others_go_on(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    register = runtime.cudaHostRegister

    def slowly(address: int, num_bytes: int, flags: int) -> int:
        assert gate.wait(10)
        return register(address, num_bytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", slowly)
    memory = PinnedMemory(4096)
    memory.wait(timeout=0)
    assert not runtime.locked
    gate.set()
    assert torch.equal(memory.keep(block(500)).whole, block(500).whole)
    assert len(runtime.locked) == 1


def test_many_threads_get_parts_of_their_own() -> None:
    memory = PinnedMemory(64 * 1024)
    failures: list[Any] = []

    def work(number: int) -> None:
        for i in range(50):
            value = float(number * 2 + i % 2)
            kept = memory.keep(HostBlock((torch.full((700 + i,), value),)))
            if not bool((kept.whole == value).all()):
                failures.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures
    assert memory.num_free == memory.num_bytes
    memory.check()


def test_ordinary_memory_leaves_blocks_where_they_are() -> None:
    one = block(8)
    assert OrdinaryMemory().keep(one) is one
