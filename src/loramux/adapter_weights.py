"""What each adapter's share of the tokens is in proportion to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from loramux.errors import ConfigError

_OTHERS = "*"
"""Stands for all names that are not there."""
_MAX_RATIO = 1000
"""A share that is smaller than another by more than this would be as good as none."""


@dataclass(frozen=True)
class AdapterWeights:
    """Weights by name; only their ratios count."""

    named: Mapping[str, float]
    others: float
    """Of every name that is not there."""
    base_name: str | None
    """How requests call the base; None where nobody asks for its weight."""

    @classmethod
    def parse(cls, text: str, base_name: str | None = None) -> AdapterWeights:
        """``"sql=4,chat=1,*=2"``; without ``*`` others have 1. Raises ConfigError."""
        named: dict[str, float] = {}
        for word in text.split(","):
            name, weight = _parse_word(word)
            if name in named:
                raise ConfigError(
                    f"adapter_weights: {name!r} is there twice, leave one of them out"
                )
            named[name] = weight
        named.setdefault(_OTHERS, 1.0)
        _check_ratio(named)
        return cls(named, named.pop(_OTHERS), base_name)

    def of(self, adapter: str | None) -> float:
        """The weight of an adapter, by its name; None is the base."""
        name = self.base_name if adapter is None else adapter
        return self.others if name is None else self.named.get(name, self.others)

    @property
    def heaviest(self) -> float:
        return max([self.others, *self.named.values()])


def _parse_word(word: str) -> tuple[str, float]:
    # An adapter's name may hold signs of equality, a number holds none.
    name, _, number = (part.strip() for part in word.rpartition("="))
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise ConfigError(
            f"adapter_weights: {word!r} is no NAME=WEIGHT with a weight above 0: write for example "
            "sql=4,chat=1"
        )
    return name, weight


def _check_ratio(weights: Mapping[str, float]) -> None:
    most = max(weights, key=weights.__getitem__)
    least = min(weights, key=weights.__getitem__)
    if weights[most] > weights[least] * _MAX_RATIO:
        raise ConfigError(
            f"adapter_weights: {most}={weights[most]:g} is more than {_MAX_RATIO:,} times "
            f"{least}={weights[least]:g} ({_OTHERS}, every other name, is 1 unless it is given): "
            "choose weights that are closer"
        )
