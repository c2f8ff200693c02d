"""Which kernels a model gets, and what is said where the fast ones are not to be had."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from loramux.ops.attention import AttentionLayer, AttentionParams, KvShape
from loramux.testing import tiny_model
from loramux.worker.backends import no_flashinfer_because
from tests.cpu.engines import assemble_tiny


def layers(key_dim: int, value_dim: int) -> dict[int, AttentionLayer]:
    return {0: AttentionLayer(4, KvShape(2, key_dim, value_dim), AttentionParams(scale=0.1))}


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FlashInfer that can be imported and no more."""
    fake = ModuleType("flashinfer")
    fake.BatchDecodeWithPagedKVCacheWrapper = object  # type: ignore[attr-defined]
    fake.BatchPrefillWithPagedKVCacheWrapper = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.delitem(sys.modules, "loramux.ops.flashinfer_attention", raising=False)


def test_a_missing_flashinfer_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "loramux.ops.flashinfer_attention", raising=False)
    objection = no_flashinfer_because(layers(128, 128), torch.bfloat16)
    assert objection is not None
    assert "pip install 'loramux[cuda]'" in objection


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("dtype", "dims", "fits"),
    [
        (torch.bfloat16, (128, 128), True),
        (torch.bfloat16, (64, 64), True),
        (torch.float32, (128, 128), False),
        (torch.bfloat16, (192, 128), False),
        (torch.bfloat16, (16, 16), False),
    ],
    ids=str,
)
def test_flashinfer_is_taken_where_it_has_kernels(
    dtype: torch.dtype, dims: tuple[int, int], fits: bool
) -> None:
    assert (no_flashinfer_because(layers(*dims), dtype) is None) == fits


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "warns"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
    ids=str,
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told_of(
    dtype: torch.dtype,
    has_bfloat16: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("loramux.worker.backends.cpu_has_bfloat16", lambda: has_bfloat16)
    assemble_tiny(tiny_model().to(dtype))
    assert ("--dtype float32" in caplog.text) == warns
