"""Which KV blocks are free. Pure bookkeeping: block numbers, no memory."""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    """Hands out block numbers ``0 … num_blocks - 1``; all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # A stack: the block freed last is given next, while it may still be in a cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back, each of which must be in use."""
        for block in reversed(blocks):
            self._used.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Assert that every block is either free or used, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._used, "a block is free and used"
        assert len(free) + len(self._used) == self.num_blocks, "a block is lost"
