"""Reads adapter_config.json: the fields that matter, and a refusal for each that is not served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from loramux.adapters.formats import peft_fields as fields
from loramux.adapters.formats.files import (
    MalformedFile,
    parse_json_object,
    read_bounded,
    refuse_placeholders,
)
from loramux.adapters.formats.meaning import BesideLora, Bias
from loramux.adapters.formats.peft_patterns import BadPattern, PatternTable
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import Stacking

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 4 * 2**20


@dataclass(frozen=True)
class PeftConfig:
    """What of adapter_config.json decides the arithmetic."""

    rank: int
    alpha: float
    rank_pattern: PatternTable[int]
    alpha_pattern: PatternTable[float]
    use_rslora: bool
    use_dora: bool
    targets: tuple[str, ...]
    """Names in ``target_modules`` where it is a list; what is adapted stands in the weight file."""
    base_model: str | None
    """What the adapter was trained on, as text. Never opened."""
    beside: BesideLora = field(default_factory=BesideLora)
    swap_gate_up: bool | None = None
    """Whether a gate_up_proj holds the rows of up first; None: as the base's family does."""

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Rank and factor of ``B A x`` of a module, by its name in the adapter.

        Raises BadPattern when the patterns cannot be evaluated.
        """
        rank = self.rank_pattern.get(module, self.rank)
        alpha = self.alpha_pattern.get(module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(directory: Path, report: Report) -> PeftConfig | None:
    """Read the configuration of an adapter directory; findings go to ``report``.

    None when it does not say what the weights mean, in which case ``report`` holds the reason.
    """
    try:
        data = read_bounded(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
        return parse_config(data, report)
    except MalformedFile as problem:
        report.refuse(str(problem))
        return None


def parse_config(data: bytes, report: Report) -> PeftConfig | None:
    """The same for bytes. Raises MalformedFile when they are no JSON object."""
    refuse_placeholders(CONFIG_FILE, data[:256])
    raw = parse_json_object(CONFIG_FILE, data)
    foreign = _foreign_format(raw)
    if foreign is not None:
        report.refuse(foreign)
        return None
    _check_other_fields(raw, report)
    _check_task(raw.get("task_type"), report)
    _check_init(raw.get("init_lora_weights"), report)
    return _arithmetic(raw, report)


def _foreign_format(raw: Mapping[str, Any]) -> str | None:
    """Why this is no configuration of a LoRA adapter at all, or None."""
    kind = raw.get("peft_type")
    if kind == "LORA":
        return None
    if isinstance(kind, str) and kind.upper() == "LORA":
        return f"peft_type is {printable(kind)}; PEFT reads and writes only LORA in capitals"
    if isinstance(kind, str) and kind:
        return f"peft_type {printable(kind, 40)} is not served, only LORA is"
    if kind is not None:
        return f"{CONFIG_FILE}: peft_type must be the string LORA"
    missing = f"{CONFIG_FILE} is not of a PEFT adapter: peft_type is missing"
    if "fine_tune_type" in raw or "lora_parameters" in raw:
        return f"{missing}; this is an mlx-lm adapter, whose weights must be adapters.safetensors"
    if "lora_tuning" in raw or "peft_scheme" in raw:
        return f"{missing}; a NeMo adapter has model_config.yaml and model_weights.ckpt instead"
    if "model_type" in raw or "architectures" in raw:
        return f"{missing}; this is the configuration of a model"
    if isinstance(raw.get("format"), str):
        return f"{missing}; its format is {printable(raw['format'], 40)}"
    return missing


def _check_other_fields(raw: Mapping[str, Any], report: Report) -> None:
    for name, value in raw.items():
        why = fields.REFUSED_WHEN_LIVE.get(name)
        if why is not None and fields.is_live(value):
            names = _names(value)
            report.refuse(f"{name}{': ' + names if names else ''} is not served ({why})")
        elif name not in fields.KNOWN and fields.is_live(value):
            report.unknown_field(name, CONFIG_FILE)
        elif name not in fields.KNOWN:
            report.warn("unknown fields in adapter_config.json are not set, so ignored", name)


def _names(value: object) -> str:
    """The strings of a list, for a message."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ""
    more = f" and {len(value) - 8} more" if len(value) > 8 else ""
    return ", ".join(printable(item) for item in value[:8]) + more


def _check_task(task: object, report: Report) -> None:
    if task is None or task == "CAUSAL_LM":
        return
    if not isinstance(task, str):
        report.refuse("task_type must be a string or null")
    elif task in fields.HEADLESS_TASKS:
        report.refuse(f"task_type {task}: made for {fields.HEADLESS_TASKS[task]}, not for text")
    elif task == "SEQ_2_SEQ_LM":
        report.warn("task_type is SEQ_2_SEQ_LM, the base is a decoder: served as CAUSAL_LM")
    else:
        report.refuse(f"task_type {printable(task, 40)} is not served, only CAUSAL_LM is")


def _check_init(init: object, report: Report) -> None:
    if init is None or isinstance(init, bool):
        return
    if not isinstance(init, str):
        report.refuse("init_lora_weights must be true, false, null or a string")
    elif init in fields.INERT_INITS:
        return
    elif init.startswith(fields.BASE_CHANGING_INITS):
        report.refuse(
            f"init_lora_weights={printable(init, 40)}: the weights are relative to a changed "
            "(residual or quantised) base; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    else:
        report.refuse(
            f"init_lora_weights={printable(init, 40)} is unknown, and may mean a changed base"
        )


def _agrees(detail: object, columns: str | None) -> bool:
    """Whether what Unsloth says of each parameter is what it says of all."""
    if not isinstance(detail, dict) or detail.keys() != {"lora_A_layout", "parameters"}:
        return False
    parameters = detail["parameters"]
    if detail["lora_A_layout"] != "grouped_by_expert" or not isinstance(parameters, dict):
        return False
    return all(
        isinstance(entry, dict) and entry.get("lora_B_layout") == columns
        for entry in parameters.values()
    )


class _Fields:
    """Typed access to the fields of one configuration; a wrong value goes to the report."""

    def __init__(self, raw: Mapping[str, Any], report: Report) -> None:
        self._raw = raw
        self._report = report

    def required(self, name: str, fits: Callable[[object], bool], rule: str) -> Any:
        if name not in self._raw:
            self._report.refuse(f"{name} is missing, and no default may stand in: it {rule}")
        elif not fits(self._raw[name]):
            self._report.refuse(f"{name} {rule}")
        else:
            return self._raw[name]
        return None

    def table(
        self, name: str, fits: Callable[[object], bool], what: str
    ) -> PatternTable[Any] | None:
        table = self._raw.get(name)
        if table is None:
            table = {}
        if not isinstance(table, dict) or not all(fits(value) for value in table.values()):
            self._report.refuse(f"{name} must be an object whose values are {what}")
            return None
        try:
            return PatternTable(table)
        except BadPattern as problem:
            self._report.refuse(f"{name} {problem}")
            return None

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            self._report.refuse(f"{name} must be true or false")
        return value is True

    def text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, str):
            self._report.refuse(f"{name} must be a string or null")
            return None
        return value or None

    def beside(self) -> BesideLora:
        return BesideLora(
            bias=self._bias(),
            lora_bias=fields.is_live(self._raw.get("lora_bias")) and self.flag("lora_bias"),
            modules_to_save=self._names("modules_to_save"),
            token_rows=self._token_rows(),
            parameters=self._names("target_parameters"),
            expert_columns=self._expert_columns(),
            ties=self.flag("ensure_weight_tying"),
        )

    def _expert_columns(self) -> Stacking:
        """Unsloth says it once for all, and again for each parameter."""
        said = self._raw.get("lora_B_layout")
        detail = self._raw.get("unsloth_fused_expert_lora")
        if not (said is None or isinstance(said, str)) or said not in fields.EXPERT_COLUMNS:
            known = " or ".join(filter(None, fields.EXPERT_COLUMNS))
            self._report.refuse(f"lora_B_layout must be {known}")
        elif fields.is_live(detail) and not _agrees(detail, said):
            self._report.refuse(
                "unsloth_fused_expert_lora does not give all parameters the lora_B_layout that is "
                "said, and A expert by expert"
            )
        else:
            return fields.EXPERT_COLUMNS[said]
        return Stacking.COLUMNS

    def _bias(self) -> Bias:
        value = self._raw.get("bias")
        if value is None or value in ("none", "all", "lora_only"):
            return cast(Bias, value or "none")
        self._report.refuse("bias must be none, all or lora_only")
        return "none"

    def _names(self, name: str) -> tuple[str, ...]:
        value = self._raw.get(name)
        if not fields.is_live(value):
            return ()
        if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
            return tuple(dict.fromkeys(value))
        self._report.refuse(f"{name} must be a list of names or null")
        return ()

    def _token_rows(self) -> Mapping[str, tuple[int, ...]]:
        name = "trainable_token_indices"
        value = self._raw.get(name)
        if not fields.is_live(value):
            return {}
        table = {"": value} if isinstance(value, list) else value
        if not isinstance(table, dict) or not all(map(fields.is_token_list, table.values())):
            self._report.refuse(
                f"{name} must be a list of different tokens, or such lists by names of modules"
            )
            return {}
        return {module: tuple(tokens) for module, tokens in table.items()}

    def targets(self) -> tuple[str, ...]:
        value = self._raw.get("target_modules")
        if value is None or isinstance(value, str):  # a regular expression: never run
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(dict.fromkeys(value))
        self._report.refuse("target_modules must be a string, a list of strings or null")
        return ()


def _arithmetic(raw: Mapping[str, Any], report: Report) -> PeftConfig | None:
    get = _Fields(raw, report)
    rank = get.required("r", fields.is_rank, "must be a positive integer")
    alpha = get.required("lora_alpha", fields.is_number, "must be a finite number")
    rank_pattern = get.table("rank_pattern", fields.is_rank, "positive integers")
    alpha_pattern = get.table("alpha_pattern", fields.is_number, "finite numbers")
    use_rslora, use_dora = get.flag("use_rslora"), get.flag("use_dora")
    swap_gate_up = None if raw.get("swap_gate_up") is None else get.flag("swap_gate_up")
    targets, base_model = get.targets(), get.text("base_model_name_or_path")
    beside = get.beside()
    if rank is None or alpha is None or rank_pattern is None or alpha_pattern is None:
        return None
    return PeftConfig(
        rank=rank,
        alpha=float(alpha),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        use_rslora=use_rslora,
        use_dora=use_dora,
        targets=targets,
        base_model=base_model,
        beside=beside,
        swap_gate_up=swap_gate_up,
    )
