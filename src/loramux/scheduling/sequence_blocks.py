"""Which KV blocks each sequence holds: found by their content, or written by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.request import Request


class SequenceBlocks:
    """Gives sequences blocks for their tokens, and makes full ones known to others.

    A sequence takes the longest chain of known blocks that its tokens begin with, and computes at
    least one token, since the next one is chosen from that. It writes only behind what it has
    found, so a block that others read is never written again.

    A block is known from the moment its last token is scheduled: whoever finds it is computed in
    the same step or a later one, and within a step each layer's keys and values are written before
    any are read (``ops.attention.Attend``). Tokens that are still pending have no key yet.
    """

    def __init__(self, blocks: BlockAllocator, block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self.num_asked = 0
        """Prompt tokens of all sequences that looked for known blocks, at their first start."""
        self.num_found = 0
        """Those of them that were in known blocks."""

    def count(self, num_tokens: int) -> int:
        """Blocks for so many tokens of one sequence."""
        return -(-num_tokens // self._block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of this length fits into the cache."""
        return self.count(num_tokens) <= self._blocks.num_blocks

    def find(self, request: Request) -> list[int]:
        """The known blocks that a waiting request can start with."""
        if request.prefix is None or request.needs_every_token:
            return []
        most = (len(request.tokens) - 1) // self._block_size
        return self._blocks.find(request.prefix.between(0, most, request.tokens))

    def has_room(self, request: Request, found: Sequence[int]) -> bool:
        """Whether there are blocks for all tokens behind those that were ``found``."""
        missing = self.count(len(request.tokens)) - len(found)
        return missing <= self._blocks.num_free - self._blocks.num_free_of(found)

    def start(self, request: Request, found: Sequence[int]) -> None:
        """Let a request begin behind the blocks that were found for it just now."""
        self._blocks.hold(found)
        request.blocks.extend(found)
        request.num_known_blocks = len(found)
        request.num_computed = len(found) * self._block_size
        has_looked = request.prefix is not None and not request.needs_every_token
        if has_looked and not request.num_preemptions:
            request.num_cached = request.num_computed
            self.num_asked += request.num_prompt_tokens
            self.num_found += request.num_cached

    def grow(self, request: Request, count: int) -> bool:
        """Find blocks for ``count`` more tokens, which are computed next; False without any."""
        end = request.num_computed + count
        missing = self.count(end) - len(request.blocks)
        if missing > 0:
            blocks = self._blocks.allocate(missing)
            if blocks is None:
                return False
            request.blocks.extend(blocks)
            self._make_known(request, end)
        return True

    def release(self, request: Request) -> None:
        """Take a request's blocks; full ones can be found until they are needed."""
        self._make_known(request, request.num_computed)
        self._blocks.free(request.blocks)
        del request.blocks[:]
        request.num_computed = 0

    def distrust(self, request: Request) -> None:
        """Let nobody find what a request has read or written, now or later.

        What it found counts, too: if that is what went wrong, everybody would find it again.
        """
        if request.prefix is not None:
            self._blocks.forget(request.prefix.known)
            request.prefix = None

    def check(self, requests: Collection[Request]) -> None:
        """Assert that requests hold what the allocator says, and nothing else is held."""
        self._blocks.check()
        held = Counter(block for request in requests for block in request.blocks)
        assert held == self._blocks.holders, "blocks leaked"
        for request in requests:
            assert len(set(request.blocks)) == len(request.blocks), "a block comes twice"
            written = request.blocks[request.num_computed // self._block_size :]
            assert all(held[block] == 1 for block in written), "a block is shared that is not full"

    def _make_known(self, request: Request, num_computed: int) -> None:
        """Let others find the full blocks of ``num_computed`` tokens, as far as these are known."""
        if request.prefix is None:
            return
        start, end = request.num_known_blocks, min(num_computed, len(request.tokens))
        num_full = end // self._block_size
        if num_full > start:
            keys = request.prefix.between(start, num_full, request.tokens)
            self._blocks.know(request.blocks[start:num_full], keys)
            request.num_known_blocks = num_full
