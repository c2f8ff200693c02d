"""Which KV blocks are held, which are free, and which are known by their content.

Pure bookkeeping: block numbers, no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from loramux.scheduling.prefixes import BlockKey


class BlockAllocator:
    """Hands out block numbers ``0 … num_blocks - 1``; all or nothing.

    A block may be held by several. One that nobody holds is free; if its content is known by a key,
    it can still be found and held again, until it is handed out to be written. Blank blocks are
    handed out first, then the known ones in the order in which they were freed.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        # A stack: the block freed last is given next, while it may still be in a cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free and known, freed first first
        self._holders: dict[int, int] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, known ones among them."""
        return len(self._blank) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    @property
    def holders(self) -> Mapping[int, int]:
        """How many hold each block that is not free."""
        return self._holders

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks to write, or None (and nothing taken) when fewer are free."""
        if count > self.num_free:
            return None
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, each of which must be held; a chain's stand in its order.

        A block cannot be found without those before it in its chain, so the last one is freed, and
        is given away, before the first one.
        """
        for block in reversed(blocks):
            holders = self._holders.pop(block)
            if holders > 1:
                self._holders[block] = holders - 1
            elif block in self._key_of:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks known by ``keys``, up to the first key that none is known by."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds."""
        return sum(block in self._kept for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found just now, to read them."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._kept.pop(block, None)

    def know(self, blocks: Iterable[int], keys: Iterable[BlockKey]) -> None:
        """Held blocks have the content of ``keys``, one each.

        Where another block is known by a key already, it stays the one that is found.
        """
        for block, key in zip(blocks, keys, strict=True):
            assert block in self._holders, "only who holds a block knows what is in it"
            if key not in self._block_of:
                assert block not in self._key_of, "a known block has been written"
                self._block_of[key] = block
                self._key_of[block] = key

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Let nobody find the blocks of ``keys`` any more; who holds them goes on holding them."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is None:
                continue
            del self._key_of[block]
            if block in self._kept:
                del self._kept[block]
                self._blank.append(block)

    def check(self) -> None:
        """Assert that every block is blank, kept or held, and known by at most one key."""
        blank, kept = set(self._blank), self._kept.keys()
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert all(count > 0 for count in self._holders.values()), "a block is held by nobody"
        assert not (blank | kept) & self._holders.keys(), "a block is free and held"
        assert not blank & kept, "a block is blank and kept"
        assert self.num_free + self.num_used == self.num_blocks, "a block is lost"
        assert {self._block_of[k]: k for k in self._block_of} == self._key_of, "a key is lost"
        assert len(self._block_of) == len(self._key_of), "a block has two keys"
        assert kept <= self._key_of.keys(), "a block is kept that nobody can find"
        assert not blank & self._key_of.keys(), "a block is known and blank"

    def _evict(self) -> int:
        """Take the known block that was freed first."""
        block, _ = self._kept.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
