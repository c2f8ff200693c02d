"""``GET /metrics``: the engine's counters and gauges, latencies and HTTP counts for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loramux.engine.interface import Engine
from loramux.server.keys import Keyring
from loramux.stats import EngineStats
from loramux.stats import Histogram as Observed

_GAUGES = {
    "num_running": ("requests_running", "Sequences in the running batch"),
    "num_waiting": ("requests_waiting", "Requests that wait for their first step"),
    "kv_blocks_used": ("kv_blocks_used", "KV cache blocks in use"),
    "kv_blocks_total": ("kv_blocks", "KV cache blocks in all"),
    "slots_used": ("adapter_slots_used", "Adapter slots in use"),
    "slots_total": ("adapter_slots", "Adapter slots in all"),
    "adapter_bytes": ("adapter_bytes", "Bytes of adapter weights on the device"),
    "host_bytes": ("adapter_host_bytes", "Bytes of adapter weights in host memory"),
    "host_adapters": ("adapters_in_host_memory", "Adapters with a copy in host memory"),
    "last_step_adapters": ("step_adapters", "Distinct adapters in the newest step"),
    "max_step_adapters": ("step_adapters_max", "Most distinct adapters in one step so far"),
}
_COUNTERS = {
    "num_steps": ("steps", "Steps of the engine"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    "output_tokens": ("output_tokens", "Tokens generated"),
    "preemptions": ("preemptions", "Sequences put back to the queue for want of blocks or slots"),
    "slot_drains": ("slot_drains", "Adapters in use that gave up their slot to one that waited"),
    "slot_loads": ("adapter_slot_loads", "Adapters copied into a slot"),
    "host_loads": ("adapter_host_loads", "Adapters read into host memory"),
    "host_evictions": (
        "adapter_host_evictions",
        "Adapters whose host copy was dropped for another",
    ),
    "slot_evictions": ("adapter_slot_evictions", "Adapters that gave up their slot to another"),
    "requests_finished": ("requests_finished", "Requests that ran to their end"),
    "requests_aborted": ("requests_aborted", "Requests that were aborted"),
}
_HISTOGRAMS = {
    "read_seconds": ("adapter_read_seconds", "Source to host memory, for each adapter read"),
    "slot_load_seconds": (
        "adapter_slot_load_seconds",
        "Host memory to slot, what each load takes of the engine's thread",
    ),
    "step_seconds": ("step_seconds", "How long each step took"),
    "step_sequences": ("step_sequences", "Sequences in each step"),
    "step_adapters": ("step_distinct_adapters", "Distinct adapters in each step"),
    "queue_seconds": ("queue_seconds", "From arrival to the first step of each sequence"),
    "slot_wait_seconds": (
        "slot_wait_seconds",
        "How long there was no slot for each sequence with an adapter that has started",
    ),
}
_FOUND = {"slot": "found_in_slot", "host": "found_in_host", "source": "found_in_source"}
_OTHER = "other"
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one app, in a registry of their own. Times are in seconds."""

    def __init__(self, engine: Engine, *, max_adapters: int, keyring: Keyring) -> None:
        """``max_adapters`` get labels of their own, the first that are asked for."""
        self.registry = CollectorRegistry()
        self._engine = engine
        self._engine_figures = _EngineCollector()
        self.registry.register(self._engine_figures)
        self.registry.register(_KeyCollector(keyring))
        self._requests = Counter(
            "loramux_http_requests",
            "HTTP requests answered; status 499 is a client that went away",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._adapter_requests = Counter(
            "loramux_adapter_requests",
            "Requests to each adapter; those of all without a label of their own are other",
            ["adapter"],
            registry=self.registry,
        )
        self._adapter_tokens = Counter(
            "loramux_adapter_tokens",
            "Tokens of requests that have ended, computed or generated, by the same labels",
            ["adapter"],
            registry=self.registry,
        )
        self._max_adapters = max_adapters
        self._labelled: set[str] = set()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Request to first token", _FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram(
            "inter_token_seconds", "Time between tokens of one choice", _NEXT_TOKEN_BUCKETS
        )
        self._whole = self._histogram("request_seconds", "Request to last token", _REQUEST_BUCKETS)

    async def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        stats, adapters = await self._engine.stats(), await self._engine.adapters()
        self._engine_figures.now = _EngineFigures(
            stats, num_adapters=len(adapters), alive=self._engine.failure is None
        )
        return generate_latest(self.registry)

    def count(self, endpoint: str, status: int) -> None:
        """Count one HTTP answer; ``endpoint`` is a route's path, never a client's text."""
        self._requests.labels(endpoint, str(status)).inc()

    def count_adapter(self, name: str) -> None:
        """Count a request that the engine has taken for an adapter."""
        if name not in self._labelled and len(self._labelled) < self._max_adapters:
            self._labelled.add(name)
        self._adapter_requests.labels(self._label(name)).inc()

    def count_tokens(self, name: str, num_tokens: int) -> None:
        """Count what a request to an adapter has used."""
        self._adapter_tokens.labels(self._label(name)).inc(num_tokens)

    def forget_adapter(self, name: str) -> None:
        """An adapter has been unloaded: its label is free for another one."""
        if name in self._labelled:
            self._labelled.remove(name)
            if name != _OTHER:
                for counter in (self._adapter_requests, self._adapter_tokens):
                    counter.remove(name)

    def _label(self, name: str) -> str:
        return name if name in self._labelled else _OTHER

    def timer(self, endpoint: str) -> Timer:
        """A clock for one request, started now."""
        return Timer(
            first_token=self._first_token.labels(endpoint),
            next_token=self._next_token.labels(endpoint),
            whole=self._whole.labels(endpoint),
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"loramux_{name}", text, ["endpoint"], buckets=buckets, registry=self.registry
        )


class Timer:
    """Measures one request from its making to ``finish``, by ``time.perf_counter``."""

    def __init__(self, *, first_token: Histogram, next_token: Histogram, whole: Histogram) -> None:
        self._first_token = first_token
        self._next_token = next_token
        self._whole = whole
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens(self, choice: int, count: int) -> None:
        """``count`` tokens of one choice have arrived together."""
        if count == 0:
            return
        now = time.perf_counter()
        if self.first_token is None:
            self.first_token = now
            self._first_token.observe(now - self._started)
        elif choice in self._last:
            gap = (now - self._last[choice]) / count
            for _ in range(count):
                self._next_token.observe(gap)
        self._last[choice] = self.last_token = now

    def finish(self) -> None:
        """The whole answer has arrived."""
        self._whole.observe(time.perf_counter() - self._started)


@dataclass(frozen=True)
class _EngineFigures:
    """What the engine says of itself."""

    stats: EngineStats
    num_adapters: int
    alive: bool


class _EngineCollector(Collector):
    """Writes the engine's own figures, which collecting could not wait for."""

    now: _EngineFigures | None = None

    def collect(self) -> Iterator[Metric]:
        if self.now is None:
            return
        stats = self.now.stats
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"loramux_{metric}", text, value=getattr(stats, name))
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"loramux_{metric}", text, value=getattr(stats, name))
        for name, (metric, text) in _HISTOGRAMS.items():
            yield _histogram(f"loramux_{metric}", text, getattr(stats, name))
        found = CounterMetricFamily(
            "loramux_adapter_finds",
            "Sequences by where their adapter was when they were queued",
            labels=["tier"],
        )
        for tier, name in _FOUND.items():
            found.add_metric([tier], getattr(stats, name))
        yield found
        yield _lora_requests(stats)
        yield GaugeMetricFamily(
            "loramux_adapters",
            "Adapters that requests can name",
            value=self.now.num_adapters,
        )
        yield GaugeMetricFamily("loramux_up", "1 while the engine lives", value=int(self.now.alive))


class _KeyCollector(Collector):
    """Reads what each key has used when it is asked for; a key is shown by its name."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "loramux_key_requests",
            "Requests to models by key, those that met a limit included",
            labels=["key"],
        )
        tokens = CounterMetricFamily(
            "loramux_key_tokens", "Tokens of prompts and answers by key", labels=["key"]
        )
        refused = CounterMetricFamily(
            "loramux_key_refused_requests",
            "Requests to models that met a limit of their key",
            labels=["key", "limit"],
        )
        in_flight = GaugeMetricFamily(
            "loramux_key_requests_in_flight",
            "Requests to models by key that run or wait",
            labels=["key"],
        )
        for account in self._keyring.accounts:
            requests.add_metric([account.name], account.num_requests)
            tokens.add_metric([account.name], account.num_tokens)
            in_flight.add_metric([account.name], account.in_flight)
            for limit, count in account.num_refused.items():
                refused.add_metric([account.name, limit], count)
        if self._keyring.accounts:
            yield from (requests, tokens, refused, in_flight)
            yield GaugeMetricFamily(
                "loramux_keys_last_reload_successful",
                "1 where the keys are those that were there to be read last, 0 where that failed",
                value=int(self._keyring.is_current),
            )
            yield GaugeMetricFamily(
                "loramux_keys_last_reload_success_timestamp_seconds",
                "Unix time at which the keys that are let in were read",
                value=self._keyring.read_at,
            )


def _histogram(name: str, text: str, observed: Observed) -> HistogramMetricFamily:
    bounds = [*map(str, observed.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(observed.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=observed.total)


def _lora_requests(stats: EngineStats) -> GaugeMetricFamily:
    """vLLM's gauge, by which routers find the servers that have an adapter at hand."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and of waiting requests; the value is the time in Unix seconds",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    names = (_joined(stats.running_adapters), _joined(stats.waiting_adapters))
    family.add_metric([str(stats.slots_total), *names], time.time())
    return family


def _joined(names: Sequence[str]) -> str:
    """With commas between; a name that has one itself would read as others, and is left out."""
    return ",".join(name for name in names if "," not in name)
