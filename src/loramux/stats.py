"""What an engine tells of itself, for logs and metrics. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie in each bucket, and their sum."""

    bounds: tuple[float, ...]
    """The upper ends of all buckets but the last, which has none."""
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of one engine, for logs and metrics. Times are in seconds."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    slots_used: int
    slots_total: int
    num_steps: int
    prompt_tokens: int
    """Computed; those found in the prefix cache are not."""
    output_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache: once for each sequence, when it starts."""
    prefix_hits: int
    """Those that were found."""
    preemptions: int
    slot_drains: int
    slot_loads: int
    slot_evictions: int
    requests_finished: int
    requests_aborted: int
    adapter_bytes: int
    host_bytes: int
    host_adapters: int
    host_evictions: int
    last_step_adapters: int
    """Distinct adapters, without the base, in the newest step."""
    max_step_adapters: int
    step_seconds: Histogram
    """From one step's end to the next where they overlap."""
    step_sequences: Histogram
    """In each step."""
    step_adapters: Histogram
    """Distinct ones, without the base, in each step."""
    queue_seconds: Histogram
    """For each sequence that has started: from its arrival on."""
    found_in_slot: int
    """Sequences whose adapter had a slot when they were queued; the base's count nowhere."""
    found_in_host: int
    """It had a copy in host memory alone."""
    found_in_source: int
    """It had none: one that others were waiting for already counts here, too."""
    host_loads: int
    """Copies made in host memory."""
    read_seconds: Histogram
    """Source to host: finding, fetching, reading and checking, for each success."""
    slot_load_seconds: Histogram
    """Host to slot: what each load takes of the engine's thread."""
    slot_wait_seconds: Histogram
    """For each sequence with an adapter that has started: how long there was no slot for it."""
    running_adapters: tuple[str, ...]
    """Names whose adapters are in the running batch, in the order of the alphabet."""
    waiting_adapters: tuple[str, ...]
    """Those with sequences that wait."""
