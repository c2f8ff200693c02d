"""What the configuration of an adapter tells about its weights, in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loramux.adapters.spec import Stacking

Bias = Literal["none", "all", "lora_only"]


@dataclass(frozen=True)
class BesideLora:
    """What was trained beside A, B and magnitudes of linears."""

    bias: Bias = "none"
    """Whose biases have values of the adapter's own."""
    lora_bias: bool = False
    """Each B has a bias."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that have values of the adapter's own."""
    token_rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Rows of embeddings that have values of the adapter's own, by the end of the module's name;
    the empty name means the base's embedding."""
    parameters: tuple[str, ...] = ()
    """Ends of names of parameters that have A and B (PEFT: target_parameters)."""
    expert_columns: Stacking = Stacking.COLUMNS
    """Of these, how the columns of B stand where it has two dimensions."""
    ties: bool = False
    """What is trained of a tied embedding holds for the head, too."""


class Meaning(Protocol):
    """A configuration, once it is read."""

    @property
    def use_dora(self) -> bool: ...

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of modules that ought to have tensors; what is adapted stands in the file."""
        ...

    @property
    def beside(self) -> BesideLora: ...

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
