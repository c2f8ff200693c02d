"""The file beside an adapter's configuration that says what all experts have in common.

TensorRT-LLM's, with its names of the projections:

    {"version": 1, "moe_shared_outer": {"moe_gate": {"shared_side": "A"}, ...}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from loramux.adapters.experts import PARTS, expert_part
from loramux.adapters.formats.files import MalformedFile, parse_json_object, read_bounded
from loramux.adapters.report import Report, printable
from loramux.adapters.trtllm_names import trtllm_name

LAYOUT_FILE = "lora_layout.json"
MAX_LAYOUT_BYTES = 64 * 2**10

Side = Literal["A", "B"]
SharedSides = Mapping[str, Side]
"""By projection of an expert (``experts.PARTS``)."""

_NAMES = {trtllm_name(expert_part("experts", 0, part)): part for part in PARTS}


def read_shared_sides(directory: Path, report: Report) -> SharedSides:
    """What the file beside the configuration says; nothing where there is none."""
    path = directory / LAYOUT_FILE
    if not os.path.lexists(path):
        return {}
    try:
        raw = parse_json_object(LAYOUT_FILE, read_bounded(path, MAX_LAYOUT_BYTES))
    except MalformedFile as problem:
        report.refuse(str(problem))
        return {}
    version, modules = raw.get("version", 1), raw.get("moe_shared_outer", {})
    if type(version) is not int or version != 1:
        report.refuse(f"{LAYOUT_FILE}: only version 1 is known")
    elif not isinstance(modules, dict):
        report.refuse(f"{LAYOUT_FILE}: moe_shared_outer must be an object")
    else:
        return dict(filter(None, (_entry(name, said, report) for name, said in modules.items())))
    return {}


def _entry(name: str, said: object, report: Report) -> tuple[str, Side] | None:
    what = f"{LAYOUT_FILE}: moe_shared_outer.{printable(name, 40)}"
    if name not in _NAMES:
        report.refuse(f"{what} is no module; there are: {', '.join(map(str, _NAMES))}")
    elif not isinstance(said, dict):
        report.refuse(f"{what} must be an object with shared_side")
    else:
        side = said.get("shared_side")
        if side == "A" or side == "B":
            return _NAMES[name], side
        if side is not None:
            report.refuse(f"{what}.shared_side must be A, B or null")
    return None
