"""What the configuration of an adapter tells about its weights, in any format."""

from __future__ import annotations

from typing import Protocol


class Meaning(Protocol):
    """A configuration, once it is read."""

    @property
    def use_dora(self) -> bool: ...

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of modules that ought to have tensors; what is adapted stands in the file."""
        ...

    @property
    def swap_gate_up(self) -> bool | None:
        """Whether up comes before gate where both are one; None when it is not said."""
        ...

    @property
    def base_model(self) -> str | None:
        """What the adapter was trained on, as text. Never opened."""
        ...

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Rank and factor of ``B A x`` of a module, by its name in the adapter."""
        ...
