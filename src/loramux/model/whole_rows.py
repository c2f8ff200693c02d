"""How the compiler adds up a row of a norm. Imported late: it takes torch's compiler along."""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices

_MAX_WHOLE_ROW = 16_384
"""Elements of a row that one block of threads adds up in its registers."""


class WholeRows(InductorChoices):
    """Adds up a row in one piece.

    Otherwise rows of more than 1,024 features are added up in pieces, whose size hangs on what else
    the kernel does. Forms of a step differ in that, and a base row must have the same bits in all.
    """

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        numel = features.reduction_numel
        if not cooperative_reduction and numel.is_number and numel <= _MAX_WHOLE_ROW:
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    def uuid(self) -> str:
        """Part of the key under which the compiler keeps what it has made."""
        return f"loramux whole rows 1 {_MAX_WHOLE_ROW}"
