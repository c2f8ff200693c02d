"""Where known adapters come from, so that they can be fetched again when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.types import AdapterId, SourceRules


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of an adapter, as it was named when the adapter was loaded."""

    adapter_id: AdapterId
    name: str
    source: str
    rules: SourceRules | None
    """What bounds the source; None: nothing does."""
