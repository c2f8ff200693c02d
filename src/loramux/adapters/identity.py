"""The digest that is an adapter's identity: what it does, not what it or its file is called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from loramux.adapters.spec import LoraSpec, ModuleDelta, Replacement
from loramux.types import AdapterId

_DOMAIN = b"loramux adapter 2\n"


def adapter_id(spec: LoraSpec, tensors: Mapping[str, torch.Tensor]) -> AdapterId:
    """SHA-256 over modules, rows, ranks, scales and the bytes of the weights that act there.

    The order of tensors in the file, its metadata and the spelling of its keys do not count; any
    other value, dtype, scale or module gives another id.
    """
    digest = hashlib.sha256(_DOMAIN)
    for delta in sorted(spec.deltas, key=_place):
        rows = None if delta.rows is None else [delta.rows.start, delta.rows.stop]
        facts = [delta.module, rows, delta.rank, float(delta.scale).hex(), _kinds(delta)]
        _add(digest, facts, _weights(delta, tensors))
    for own in sorted(spec.replacements, key=_place_of_own):
        facts = ["own", own.module, own.parameter, own.rows]
        _add(digest, facts, [tensors[own.tensor]])
    return AdapterId(digest.hexdigest())


def _place(delta: ModuleDelta) -> tuple[str, int]:
    return delta.module, 0 if delta.rows is None else delta.rows.start


def _place_of_own(own: Replacement) -> tuple[str, str, bool]:
    return own.module, own.parameter, own.rows is not None


def _kinds(delta: ModuleDelta) -> list[bool]:
    """Which of the tensors there are that a delta need not have."""
    return [delta.magnitude is not None, delta.b_bias is not None]


def _weights(delta: ModuleDelta, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    by_row = (key for key in (delta.b, delta.magnitude, delta.b_bias) if key is not None)
    return [tensors[delta.a], *(torch.cat(delta.pick(tensors[key])) for key in by_row)]


def _add(digest: hashlib._Hash, facts: list[object], weights: list[torch.Tensor]) -> None:
    """All that is said about weights, which tells how many bytes follow, and these bytes: so no two
    adapters can collide."""
    parts = [[str(tensor.dtype), list(tensor.shape)] for tensor in weights]
    digest.update(json.dumps([*facts, parts]).encode() + b"\n")
    for tensor in weights:
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
