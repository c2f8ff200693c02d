"""By which keys full KV blocks are found again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NewType

from loramux.types import AdapterId

BlockKey = NewType("BlockKey", bytes)
"""Digest of all that the keys and values in a block depend on."""

_TOKEN = "I"
"""As tokens are hashed: 32 bits, more than any vocabulary needs."""


class PrefixKeys:
    """Keys of the full blocks at the beginning of one sequence, each made once.

    A block's key is SHA-256 of the key before it and its own tokens, and the first one's of the
    root, which is made of the adapter and the salt. So equal keys mean equal tokens from the start
    on, computed with equal weights: two keys that collide would show one tenant the text of
    another, which rules out faster hashes.
    """

    def __init__(self, root: BlockKey, block_size: int, keys: Sequence[BlockKey] = ()) -> None:
        self.block_size = block_size
        self._root = root
        self._keys = list(keys)

    @staticmethod
    def of(adapter_id: AdapterId | None, cache_salt: str | None, block_size: int) -> PrefixKeys:
        """Those of a sequence of an adapter, None for the base; salts keep sequences apart."""
        return PrefixKeys(
            BlockKey(sha256(repr((adapter_id, cache_salt)).encode()).digest()), block_size
        )

    def copy(self) -> PrefixKeys:
        """For another sequence that begins with the same tokens."""
        return PrefixKeys(self._root, self.block_size, self._keys)

    @property
    def known(self) -> Sequence[BlockKey]:
        """All that have been made."""
        return self._keys

    def between(self, start: int, end: int, tokens: Sequence[int]) -> Sequence[BlockKey]:
        """The keys of blocks ``start … end - 1`` of a sequence with at least ``end`` full ones."""
        keys, size = self._keys, self.block_size
        if len(keys) < end:
            new = array(_TOKEN, tokens[len(keys) * size : end * size])
            assert len(new) == (end - len(keys)) * size, "a key of a block that is not full"
            content, step = new.tobytes(), size * new.itemsize
            key = keys[-1] if keys else self._root
            for at in range(0, len(content), step):
                key = BlockKey(sha256(key + content[at : at + step]).digest())
                keys.append(key)
        return keys[start:end]
