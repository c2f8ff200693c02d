"""Options, frozen. Flags and ``docs/configuration.md`` are generated from the fields."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loramux.adapter_weights import AdapterWeights
from loramux.errors import ConfigError

BLOCK_SIZE = 16
"""Tokens in one KV block."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class StepLimits:
    """How much one step can hold."""

    max_num_seqs: int
    max_step_tokens: int


DEFAULT_HOST_BYTES = 8 * 2**30
"""Of the host cache."""

DEFAULT_LIMITS = {"cpu": StepLimits(64, 1024), "cuda": StepLimits(256, 8192)}
"""By the kind of device that computes the steps."""


def option(default: Any, text: str) -> Any:
    """A dataclass field whose ``text`` is its help on the command line and in the docs."""
    return field(default=default, metadata={"help": text})


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"8GB"``, ``"1073741824"`` as a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is no size: write for example 512MiB or 8GB")
    unit = (match[2] or "").lower()
    return int(float(match[1]) * (_UNITS | _BINARY_UNITS)[unit])


def cache_folder(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/loramux``, or ``~/.cache/loramux`` where it is unset or not absolute."""
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "loramux"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The base model."""

    dtype: str = option("auto", "float32, bfloat16 or auto (what the checkpoint is stored in)")
    device: str = option("auto", "cpu, cuda or auto (cuda where there is a GPU)")
    max_model_len: int | None = option(
        None, "longest prompt plus output in tokens; default: the model's own"
    )
    threads: int | None = option(None, "CPU threads for torch; default: torch's own choice")
    self_check: bool = option(True, "compare paged with plain attention on a few tokens at start")

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype {self.dtype!r} is unknown: use float32, bfloat16 or auto")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is unknown: use cpu, cuda or auto")
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("threads", self.threads, 1)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Slots and memory of the adapters."""

    max_loras: int = option(8, "slots: distinct adapters in one step")
    device_cache: str | None = option(
        None,
        "bytes for adapter weights, such as 2GiB; default: max_loras adapters of rank 64 on all "
        "linears, or as large as the largest that is known at start, in at most half of the memory "
        "that is free",
    )
    host_cache: str | None = option(
        None,
        "bytes of host memory for adapter weights, such as 64GiB; adapters beyond are read from "
        "their sources again when they are needed; default: 8GiB, or as much as device_cache",
    )
    max_cpu_loras: int | None = option(
        None, "most adapters with a copy in host memory, whatever host_cache has room for"
    )
    max_rank: int = option(512, "largest LoRA rank that is accepted")
    lora_target_modules: str | None = option(
        None,
        "the modules that adapters may change, such as q_proj,v_proj or names of TensorRT-LLM; an "
        "adapter with others is refused; default: all",
    )
    lenient: bool = option(
        False,
        "ignore fields of an adapter's configuration that are set and unknown, with a warning for "
        "each, instead of refusing the adapter; its answers may differ from PEFT's",
    )
    adapter_max_wait: float = option(
        2.0,
        "seconds that a request waits for a slot while other adapters use all of them; then the "
        "slot with the fewest running sequences is drained for it",
    )
    tuning: str | None = option(
        None,
        "tile sizes from this file, made by `loramux tune`, before the shipped ones (GPU only)",
    )

    def __post_init__(self) -> None:
        _at_least("max_loras", self.max_loras, 1)
        _at_least("max_rank", self.max_rank, 1)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}): "
                "every adapter with a slot has a copy in host memory"
            )
        if not 0 <= self.adapter_max_wait < math.inf:
            raise ConfigError(
                f"adapter_max_wait must be a number of seconds, not {self.adapter_max_wait}"
            )
        words = self.lora_target_modules
        if words is not None and not all(re.fullmatch(r"[\w.-]+", w) for w in words.split(",")):
            raise ConfigError(
                f"lora_target_modules {words!r}: write names with commas between, such as "
                "q_proj,v_proj"
            )
        if self.device_cache is not None and parse_bytes(self.device_cache) < 1:
            raise ConfigError("device_cache must be at least one byte")
        if self.host_cache is not None:
            parse_bytes(self.host_cache)

    def host_bytes(self, device_bytes: int) -> int:
        """Bytes of the host cache beside a device cache of so many. Raises ConfigError."""
        if self.host_cache is None:
            return max(DEFAULT_HOST_BYTES, device_bytes)
        host_bytes = parse_bytes(self.host_cache)
        if host_bytes < device_bytes:
            raise ConfigError(
                f"host_cache ({host_bytes:,} bytes) is below the device cache ({device_bytes:,}): "
                "every adapter on the device has a copy in host memory"
            )
        return host_bytes


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Adapters that come from other machines."""

    disk_cache: str | None = option(
        None,
        "directory that keeps fetched adapters; default: adapters in $XDG_CACHE_HOME/loramux or "
        "~/.cache/loramux",
    )
    disk_cache_bytes: str = option("20GiB", "bytes that it may hold")
    adapters_offline: bool = option(
        False, "serve fetched adapters without asking whether they have changed, and no others"
    )

    def __post_init__(self) -> None:
        if parse_bytes(self.disk_cache_bytes) < 1:
            raise ConfigError("disk_cache_bytes must be at least one byte")

    def cache_directory(self) -> Path:
        """Raises ConfigError where there is no home directory."""
        try:
            if self.disk_cache is None:
                return cache_folder(os.environ) / "adapters"
            return Path(self.disk_cache).expanduser().absolute()
        except RuntimeError as error:
            raise ConfigError(f"disk_cache: {error} Give a directory that needs none") from None


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """How steps are filled."""

    max_num_seqs: int | None = option(
        None, "sequences in one step; default: 64 on a CPU, 256 on a GPU"
    )
    max_step_tokens: int | None = option(
        None,
        "tokens in one step, longer prompts are read in chunks; default: 1024 on a CPU, 8192 on a "
        "GPU",
    )
    kv_cache: str | None = option(
        None,
        "bytes for the KV cache, such as 4GiB; default: max_num_seqs sequences, on a CPU at most "
        "2GiB, on a GPU at most what gpu_memory leaves",
    )
    gpu_memory: float = option(
        0.9, "share of the GPU's memory that may be in use, where kv_cache is not given"
    )
    prefix_cache: bool = option(
        True,
        "keep the KV blocks of what has been computed, for requests to the same model that begin "
        "with the same tokens",
    )
    max_waiting: int = option(4096, "requests that may wait; further ones are refused")
    adapter_weights: str | None = option(
        None,
        "adapters that compete get tokens in proportion to these, such as sql=4,chat=1; the base "
        "goes by its name in requests, and * is every other name, 1 by default; default: no "
        "shares, requests are served in order of arrival",
    )

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_step_tokens", self.max_step_tokens, 1)
        _at_least("max_waiting", self.max_waiting, 1)
        if not 0 < self.gpu_memory <= 1:
            raise ConfigError(f"gpu_memory must be above 0 and at most 1, not {self.gpu_memory}")
        if self.kv_cache is not None:
            parse_bytes(self.kv_cache)
        given = (self.max_num_seqs, self.max_step_tokens)
        if given[0] is not None and given[1] is not None and given[1] < given[0]:
            raise ConfigError(
                f"max_step_tokens ({given[1]}) is below max_num_seqs ({given[0]}): each running "
                "sequence needs one token a step"
            )
        self.weights()

    def weights(self, base_name: str | None = None) -> AdapterWeights | None:
        """None without shares; ``base_name`` is how requests call the base. Raises ConfigError."""
        if self.adapter_weights is None:
            return None
        return AdapterWeights.parse(self.adapter_weights, base_name)

    def limits(self, device: str) -> StepLimits:
        """On a kind of device; what is not given makes room for what is."""
        default = DEFAULT_LIMITS[device]
        most = self.max_step_tokens or default.max_step_tokens
        max_num_seqs = self.max_num_seqs or min(default.max_num_seqs, most)
        return StepLimits(max_num_seqs, self.max_step_tokens or max(most, max_num_seqs))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything an engine needs beside the base model's place."""

    model: ModelOptions = field(default_factory=ModelOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    sources: SourceOptions = field(default_factory=SourceOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = option(
        None, "name of the base model in requests; default: its path"
    )
    max_body_bytes: int = option(4 * 2**20, "largest request body")
    max_request_seconds: float = option(
        3600.0,
        "seconds until an answer must be complete; a request may ask for fewer by its field "
        "timeout",
    )
    stream_interval: float = option(
        0.02,
        "seconds between events of one stream, but for the first and the last: tokens that come "
        "faster share an event; 0 sends each by itself",
    )
    shutdown_grace: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM or SIGINT"
    )
    adapter_root: str | None = option(
        None,
        "directory that adapters loaded over HTTP must lie in, by paths relative to it; default: "
        "any local directory",
    )
    adapter_sources: tuple[str, ...] = option(
        (),
        "beginning of remote sources that may be loaded over HTTP, such as hf:my-org or "
        "s3://bucket/adapters/; may be repeated; default: none",
    )

    registry: str | None = option(
        None,
        "file that keeps the adapters loaded over HTTP for the next start; servers of one base may "
        "share it; default: they are forgotten",
    )
    log_format: str = option("text", "text, or json: an object a line")
    access_log: bool = option(False, "a line in the log for each request that has been answered")
    tool_parser: str = option(
        "auto",
        "how the model writes tool calls: hermes (Qwen too), llama3, mistral, or auto (what its "
        "chat template says)",
    )
    metrics_adapters: int = option(
        50,
        "adapters whose requests /metrics counts by name, the first that are asked for; the others "
        "count together",
    )
    keys: str | None = option(
        None,
        "TOML file of the keys that are let in, with what each may do and use (docs/serving.md), "
        "read again when it changes; default: the file in LORAMUX_KEYS, if that is set",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "collector of OpenTelemetry that gets a span of each request to a model, by OTLP over "
        "HTTP, such as http://localhost:4318/v1/traces; needs the extra otel; default: no spans",
    )

    def __post_init__(self) -> None:
        _at_least("metrics_adapters", self.metrics_adapters, 0)
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format {self.log_format!r} is unknown: use text or json")
        if self.tool_parser not in ("auto", "hermes", "llama3", "mistral"):
            raise ConfigError(
                f"tool_parser {self.tool_parser!r} is unknown: use auto, hermes, llama3 or mistral"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        _at_least("max_body_bytes", self.max_body_bytes, 1)
        if not 0 < self.max_request_seconds < math.inf:
            raise ConfigError(
                f"max_request_seconds must be above 0, not {self.max_request_seconds}"
            )
        if not 0 <= self.stream_interval <= 1:
            raise ConfigError(f"stream_interval must be from 0 to 1, not {self.stream_interval}")
        if not 0 <= self.shutdown_grace < math.inf:
            raise ConfigError(f"shutdown_grace must not be negative, not {self.shutdown_grace}")
        if self.otlp_traces_endpoint is not None:
            _check_endpoint(self.otlp_traces_endpoint)
        for prefix in self.adapter_sources:
            if not re.match(r"hf:|[A-Za-z][A-Za-z0-9+.\-]*://", prefix):
                raise ConfigError(
                    f"adapter_sources: {prefix!r} is no beginning of a remote source: write for "
                    "example hf:my-org or https://host/adapters/"
                )


def _check_endpoint(endpoint: str) -> None:
    if re.search(r"[@?#]", endpoint):
        # Not shown: it may be a credential, which the log would have with each failure.
        raise ConfigError(
            "otlp_traces_endpoint takes no user, query or fragment: credentials go into the "
            "variable OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?/[!-~]*", endpoint):
        raise ConfigError(
            f"otlp_traces_endpoint {endpoint!r} is no whole URL: write it with its path, such as "
            "http://localhost:4318/v1/traces"
        )


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")
