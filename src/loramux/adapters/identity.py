"""The digest that is an adapter's identity: what it does, not what it or its file is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from loramux.adapters.spec import LoraSpec, ModuleDelta
from loramux.types import AdapterId

_DOMAIN = b"loramux adapter 1\n"


def adapter_id(spec: LoraSpec, tensors: Mapping[str, torch.Tensor]) -> AdapterId:
    """SHA-256 over modules, rows, ranks, scales and the bytes of the weights that act there.

    The order of tensors in the file, its metadata and the spelling of its keys do not count; any
    other value, dtype, scale or module gives another id.
    """
    digest = hashlib.sha256(_DOMAIN)
    for delta in sorted(spec.deltas, key=_place):
        weights = _weights(delta, tensors)
        digest.update(_description(delta, weights))
        for tensor in weights:
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return AdapterId(digest.hexdigest())


def _place(delta: ModuleDelta) -> tuple[str, int]:
    return delta.module, 0 if delta.rows is None else delta.rows.start


def _weights(delta: ModuleDelta, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    by_row = (delta.b,) if delta.magnitude is None else (delta.b, delta.magnitude)
    return [tensors[delta.a], *(torch.cat(delta.pick(tensors[key])) for key in by_row)]


def _description(delta: ModuleDelta, weights: list[torch.Tensor]) -> bytes:
    """All but the bytes; it tells how many of them follow, so that no two adapters can collide."""
    parts = [[str(tensor.dtype), list(tensor.shape)] for tensor in weights]
    rows = None if delta.rows is None else [delta.rows.start, delta.rows.stop]
    line = [delta.module, rows, delta.rank, float(delta.scale).hex(), parts]
    return json.dumps(line).encode() + b"\n"
