"""By which keys full KV blocks are found again."""

from __future__ import annotations

import pytest

from loramux.scheduling.prefixes import BlockKey, PrefixKeys
from loramux.types import AdapterId

TOKENS = list(range(12))


def keys(
    tokens: list[int] = TOKENS, adapter: str | None = None, salt: str | None = None
) -> list[BlockKey]:
    prefix = PrefixKeys.of(None if adapter is None else AdapterId(adapter), salt, 4)
    return list(prefix.between(0, len(tokens) // 4, tokens))


def test_equal_tokens_have_equal_keys_up_to_the_first_difference() -> None:
    changed = [*TOKENS[:5], 99, *TOKENS[6:]]
    first, second = keys(), keys(changed)
    assert len(first) == len(set(first)) == 3
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2], "a key forgets what came before its block"


def test_tokens_are_kept_apart_to_their_last_bit() -> None:
    assert keys([0, 0, 0, 1]) != keys([0, 0, 1, 0]) != keys([0, 0, 0, 2**24])


@pytest.mark.parametrize(
    "other",
    [
        {"adapter": "a"},
        {"salt": "a"},
        {"adapter": "a", "salt": "b"},
        {"adapter": "b", "salt": "a"},
        {"adapter": "None"},
        {"salt": "None"},
        {"salt": "', 'b"},
        {"salt": "\ud800"},
    ],
    ids=str,
)
def test_no_two_roots_are_alike(other: dict[str, str]) -> None:
    plain = [keys(), keys(adapter="a', 'b"), keys(adapter="a", salt="c")]
    assert all(not set(keys(**other)) & set(one) for one in plain)


def test_keys_do_not_hang_on_when_they_were_made() -> None:
    prefix = PrefixKeys.of(None, None, 4)
    assert [*prefix.between(0, 1, TOKENS[:6]), *prefix.between(1, 3, TOKENS)] == keys()
    assert list(prefix.known) == keys()


def test_a_copy_goes_its_own_way() -> None:
    prefix = PrefixKeys.of(None, None, 4)
    prefix.between(0, 1, TOKENS)
    copy, other = prefix.copy(), [*TOKENS[:4], 7, 7, 7, 7]
    assert list(copy.between(0, 2, other)) == keys(other)
    assert list(prefix.between(0, 2, TOKENS)) == keys()[:2]


def test_a_block_that_is_not_full_has_no_key() -> None:
    with pytest.raises(AssertionError, match="not full"):
        PrefixKeys.of(None, None, 4).between(0, 2, TOKENS[:7])
