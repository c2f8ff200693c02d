"""What about an adapter is no reason to refuse it, but worth a look."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.adapters.formats.peft_config import PeftConfig
from loramux.adapters.inspected import ModuleFacts, ReferenceBase, Stated, place
from loramux.adapters.report import Report, printable

LARGE_SCALE = 16.0
"""Scales beyond are told as unusual: trained ones are mostly between 0.5 and 8."""

LARGE_DELTA = 0.5
"""The same for a delta's norm as a part of the base weight's: trained ones are below 0.1."""


def remarks(
    stated: Stated,
    config: PeftConfig | None,
    modules: Sequence[ModuleFacts],
    base: ReferenceBase | None,
) -> tuple[str, ...]:
    """What the configuration, the modules and their comparison with the base show."""
    unusual = Report()
    if stated.dropout:
        unusual.warn(f"lora_dropout is {stated.dropout:g}: of no effect, it acts in training only")
    if config is not None and config.use_dora:
        unusual.warn("DoRA: norms are those of scale B A, without the gain of each output row")
    ranks = sorted({facts.rank for facts in modules if facts.rank is not None})
    if len(ranks) > 1:
        unusual.warn(f"ranks differ between modules: {', '.join(map(str, ranks))}")
    for facts in modules:
        _remark_on_module(facts, unusual)
    if base is not None:
        _remark_on_base(stated, modules, base, unusual)
    return unusual.warnings


def _remark_on_module(facts: ModuleFacts, unusual: Report) -> None:
    if facts.scale is not None and abs(facts.scale) > LARGE_SCALE:
        unusual.warn(f"scale {facts.scale:g} is beyond {LARGE_SCALE:g}", facts.module)
    if facts.scale is not None and facts.scale < 0:
        unusual.warn("the scale is negative: the delta is subtracted", facts.module)
    if facts.delta_norm == 0:
        unusual.warn("the delta is zero (lora_B, lora_A or the scale)", facts.module)
    if facts.relative_norm is not None and facts.relative_norm > LARGE_DELTA:
        unusual.warn(f"the delta is larger than {LARGE_DELTA:g} of the base weight", facts.module)


def _remark_on_base(
    stated: Stated, modules: Sequence[ModuleFacts], base: ReferenceBase, unusual: Report
) -> None:
    for text in base.remarks:
        unusual.warn(text)
    revision = stated.text("revision")
    if revision is not None:
        unusual.warn(f"revision {printable(revision)} of the base is named: not compared")
    if any(facts.delta_norm is not None and facts.base_norm is None for facts in modules):
        unusual.warn("weights of the base that cannot be read as safetensors: no relative norm")
    layers = {place(name)[1] for name in base.layout.modules} - {None}
    adapted = {facts.layer for facts in modules} - {None}
    if modules and len(adapted & layers) < len(layers):
        unusual.warn(f"adapts {len(adapted & layers)} of {len(layers)} layers")
