"""Triton's interpreter, as far as tests must know it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from loramux.ops.lora_launches import INTERPRETED


@pytest.fixture
def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products row by row, as on a GPU: numpy's sum up a row by its place among the others."""
    if not INTERPRETED:
        return
    product = InterpreterBuilder.create_dot

    def row_by_row(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        rows = [
            product(self, TensorHandle(x[None], a.dtype), b, TensorHandle(y[None], d.dtype), *how)
            for x, y in zip(a.data, d.data, strict=True)
        ]
        return TensorHandle(np.concatenate([row.data for row in rows]), rows[0].dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", row_by_row)
