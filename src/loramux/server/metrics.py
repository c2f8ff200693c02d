"""``GET /metrics``: the engine's counters and gauges, latencies and HTTP counts for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loramux.engine.interface import Engine

_GAUGES = {
    "num_running": ("requests_running", "Sequences in the running batch"),
    "num_waiting": ("requests_waiting", "Requests that wait for their first step"),
    "kv_blocks_used": ("kv_blocks_used", "KV cache blocks in use"),
    "kv_blocks_total": ("kv_blocks", "KV cache blocks in all"),
    "slots_used": ("adapter_slots_used", "Adapter slots in use"),
    "slots_total": ("adapter_slots", "Adapter slots in all"),
    "adapter_bytes": ("adapter_bytes", "Bytes of adapter weights on the device"),
    "last_step_adapters": ("step_adapters", "Distinct adapters in the newest step"),
    "max_step_adapters": ("step_adapters_max", "Most distinct adapters in one step so far"),
}
_COUNTERS = {
    "num_steps": ("steps", "Steps of the engine"),
    "step_seconds": ("step_seconds", "Seconds spent in steps"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens read"),
    "output_tokens": ("output_tokens", "Tokens generated"),
    "preemptions": ("preemptions", "Sequences put back to the queue for want of blocks or slots"),
    "slot_drains": ("slot_drains", "Adapters in use that gave up their slot to one that waited"),
    "slot_loads": ("adapter_slot_loads", "Adapters copied into a slot"),
    "slot_evictions": ("adapter_slot_evictions", "Adapters that gave up their slot to another"),
    "requests_finished": ("requests_finished", "Requests that ran to their end"),
    "requests_aborted": ("requests_aborted", "Requests that were aborted"),
}
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one app, in a registry of their own. Times are in seconds."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._requests = Counter(
            "loramux_http_requests",
            "HTTP requests answered; status 499 is a client that went away",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Request to first token", _FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram(
            "inter_token_seconds", "Time between tokens of one choice", _NEXT_TOKEN_BUCKETS
        )
        self._whole = self._histogram("request_seconds", "Request to last token", _REQUEST_BUCKETS)

    def count(self, endpoint: str, status: int) -> None:
        """Count one HTTP answer; ``endpoint`` is a route's path, never a client's text."""
        self._requests.labels(endpoint, str(status)).inc()

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
    """Measures one request from its making to ``finish``."""

    def __init__(self, *, first_token: Histogram, next_token: Histogram, whole: Histogram) -> None:
        self._first_token = first_token
        self._next_token = next_token
        self._whole = whole
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}

    def tokens(self, choice: int, count: int) -> None:
        """``count`` tokens of one choice have arrived together."""
        if count == 0:
            return
        now = time.perf_counter()
        if not self._last:
            self._first_token.observe(now - self._started)
        elif choice in self._last:
            self._next_token.observe((now - self._last[choice]) / count)
        self._last[choice] = now

    def finish(self) -> None:
        """The whole answer has arrived."""
        self._whole.observe(time.perf_counter() - self._started)


class _EngineCollector(Collector):
    """Reads the engine's own figures when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, (metric, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"loramux_{metric}", text, value=getattr(stats, name))
        for name, (metric, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"loramux_{metric}", text, value=getattr(stats, name))
        yield GaugeMetricFamily(
            "loramux_adapters",
            "Adapters that requests can name",
            value=len(self._engine.adapters()),
        )
        yield GaugeMetricFamily("loramux_up", "1 while the engine lives", value=self._up())

    def _up(self) -> int:
        return int(self._engine.failure is None)
