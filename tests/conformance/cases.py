"""The conformance cases as typed records, made once per machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loramux.demo.base import publish

GENERATOR = Path(__file__).with_name("make_cases.py")
CACHE = GENERATOR.parents[2] / ".cache"

_VERSIONED = ("torch", "transformers", "peft", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Golden:
    """Greedy continuation of one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    """Best minus second best logit at each step."""
    text: str


@dataclass(frozen=True)
class Row:
    """One request of a mixed batch; ``adapter`` None is the base."""

    adapter: str | None
    prompt: tuple[int, ...]
    golden: Golden


@dataclass(frozen=True)
class Case:
    """One adapter with its answers, or one mixed batch (``rows`` and ``adapters`` only)."""

    name: str
    why: str
    kind: Literal["serve", "refuse", "serve_or_refuse"]
    base: Path
    adapter: Path | None
    prompts: tuple[tuple[int, ...], ...]
    golden: tuple[Golden, ...]
    base_golden: tuple[Golden | None, ...]
    """Answers of the base alone; None where it cannot take the prompt."""
    expect_reason: tuple[str, ...]
    rows: tuple[Row, ...]
    adapters: Mapping[str, Path]
    marker: str | None
    """A file of this name in the temporary directory: code out of the adapter was run."""
    forbid: str | None
    """Text that no reply may hold."""


@functools.cache
def load_cases() -> tuple[Case, ...]:
    """All cases in their fixed order; made first if this machine does not have them."""
    root = cases_directory()
    raw = json.loads((root / "cases.json").read_text(encoding="utf-8"))
    return tuple(_case(root, entry) for entry in raw["cases"])


def cases_directory() -> Path:
    """Where the cases lie; another generator or another library version has another place."""
    digest = hashlib.sha256(GENERATOR.read_bytes())
    for package in _VERSIONED:
        digest.update(f"{package}=={importlib.metadata.version(package)}\n".encode())
    place = CACHE / f"conformance-{digest.hexdigest()[:16]}"
    if not place.is_dir():
        publish(place, _make)
    return place


def _make(target: Path) -> None:
    subprocess.run(
        [sys.executable, str(GENERATOR), str(target)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )


def _case(root: Path, raw: Mapping[str, Any]) -> Case:
    return Case(
        name=raw["name"],
        why=raw["why"],
        kind=raw["kind"],
        base=root / "bases" / raw["base"],
        adapter=root / raw["adapter"] if "adapter" in raw else None,
        prompts=tuple(tuple(prompt) for prompt in raw.get("prompts", ())),
        golden=tuple(_golden(answer) for answer in raw.get("golden", ())),
        base_golden=tuple(a and _golden(a) for a in raw.get("base_golden", ())),
        expect_reason=tuple(raw["expect_reason"]),
        rows=tuple(
            Row(row["adapter"], tuple(row["prompt"]), _golden(row["golden"]))
            for row in raw.get("rows", ())
        ),
        adapters={name: root / place for name, place in raw.get("adapters", {}).items()},
        marker=raw.get("marker"),
        forbid=raw.get("forbid"),
    )


def _golden(raw: Mapping[str, Any]) -> Golden:
    return Golden(
        tokens=tuple(raw["tokens"]),
        logprobs=tuple(raw["logprobs"]),
        margins=tuple(raw["margins"]),
        text=raw["text"],
    )
