"""Which text each adapter's tokens are: the base's, unless it has more tokens than the base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loramux.engine.interface import EngineText
from loramux.types import AdapterId


@dataclass(frozen=True)
class Language:
    """How tokens read, and which of them end a text."""

    text: EngineText
    eos_token_ids: frozenset[int]
    fingerprint: str = ""
    """Digest of the files that say so; none for what is the base's own."""
    warnings: tuple[str, ...] = ()


ReadLanguage = Callable[[str, Path, int], Language]
"""Name, folder and vocabulary of an adapter -> its language. Raises AdapterRefused."""


class Languages:
    """The base's language and those of adapters with a larger vocabulary, while they are there.

    The engine's thread adds and forgets; any thread may ask, and any may read a folder.
    """

    def __init__(self, base: Language, read: ReadLanguage) -> None:
        self._base = base
        self._own: dict[AdapterId, Language] = {}
        self.read = read

    def of(self, adapter_id: AdapterId | None) -> Language:
        """An adapter's language; None is the base, and so is all that has no language of its own.

        To be certain of it, hold the adapter.
        """
        return self._base if adapter_id is None else self._own.get(adapter_id, self._base)

    def add(self, adapter_id: AdapterId, language: Language) -> None:
        self._own[adapter_id] = language

    def forget(self, adapter_id: AdapterId) -> None:
        """Nothing happens to an adapter that speaks as the base does."""
        self._own.pop(adapter_id, None)

    def known(self) -> set[AdapterId]:
        """Adapters with a language of their own."""
        return set(self._own)
