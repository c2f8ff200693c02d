"""Which adapter each row of a batch wants."""

from __future__ import annotations

BASE = -1


def rows_of(popularity: str, num_rows: int, num_adapters: int) -> list[int]:
    """Adapter of each row (BASE for none): identical, distinct, half (half base), or base."""
    if popularity == "identical":
        return [0] * num_rows
    if popularity == "distinct":
        return [row % num_adapters for row in range(num_rows)]
    if popularity == "half":
        return [BASE if row % 2 else row // 2 % num_adapters for row in range(num_rows)]
    if popularity == "runs":  # prefill: each adapter's rows stand together
        return [row * num_adapters // num_rows for row in range(num_rows)]
    assert popularity == "base", popularity
    return [BASE] * num_rows
