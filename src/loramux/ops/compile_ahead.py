"""Compiles Triton kernels before they are launched: many at a time, in processes of their own.

Much of Triton's compiler is Python. Threads of one process would take turns with each other, and
with what goes through the model meanwhile.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import triton

from loramux.ops.compile_worker import Job

log = logging.getLogger(__name__)

_MOST_PROCESSES = 16
"""Each takes some 200 MB while it compiles."""


@contextmanager
def compiled_at_once(*, ignore_errors: bool = False) -> Iterator[None]:
    """Kernels whose ``warmup`` is called inside are there at the end.

    As many are compiled at a time as there are processors, in threads. With ``ignore_errors`` what
    fails is left out.
    """
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=ignore_errors),
    ):
        yield


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Kernels whose ``warmup`` is called inside are there at the end.

    What an earlier start has left in Triton's cache is taken from there. From the first one on that
    is missing, processes fill the cache beside what goes on inside. At the end everything is taken
    from there, or compiled after all where a process could not.
    """
    ahead = _Ahead()
    try:
        with ahead.noting():
            yield
        ahead.finish()
    finally:
        ahead.close()


class _Ahead:
    """Notes kernels in place of compiling them, once one was missing in Triton's cache."""

    def __init__(self) -> None:
        self._noted: dict[Job, Any] = {}
        self._processes: _Processes | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Inside, Triton asks here before it compiles, and tells when it has."""
        knobs: Any = triton.knobs  # type: ignore[attr-defined]
        hook, listener = knobs.runtime.jit_cache_hook, knobs.compilation.listener

        def look(*, cache_hit: bool, **told: Any) -> None:
            if not cache_hit and self._processes is None:
                self._processes = _Processes()
            if listener is not None:
                listener(cache_hit=cache_hit, **told)

        knobs.runtime.jit_cache_hook, knobs.compilation.listener = self._is_noted, look
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook, knobs.compilation.listener = hook, listener

    def _is_noted(self, *, fn: Any, is_manual_warmup: bool, **call: Any) -> bool:
        """Whether Triton is to leave a kernel alone."""
        if self._processes is None or not is_manual_warmup:
            return False
        job = Job(fn.module, fn.name, call["compile"]["specialization_data"])
        if job not in self._noted:
            self._noted[job] = fn.jit_function
            self._processes.submit(job)
        return True

    def finish(self) -> None:
        """Take what was noted from Triton's cache, or compile it."""
        if self._processes is None:
            return
        self._processes.wait()
        with compiled_at_once():
            for job, kernel in self._noted.items():
                kernel.preload(job.specialization)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


class _Processes:
    """Processes that fill Triton's cache, each with a thread that gives it one job at a time."""

    def __init__(self) -> None:
        target: Any = triton.runtime.driver.active.get_current_target()
        fields = json.dumps([target.backend, target.arch, target.warp_size])
        self._command = [sys.executable, "-P", "-m", "loramux.ops.compile_worker", fields]
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        num_processes = min(os.cpu_count() or 1, _MOST_PROCESSES)
        self._idle: queue.SimpleQueue[subprocess.Popen[str] | None] = queue.SimpleQueue()
        for _ in range(num_processes):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="loramux-compile")

    def submit(self, job: Job) -> None:
        self._threads.submit(self._run, job)

    def wait(self) -> None:
        self._threads.shutdown()

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            process = self._idle.get()
            if process is not None:
                with suppress(OSError):
                    process.kill()
                process.wait()

    def _run(self, job: Job) -> None:
        process = self._idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            process.stdout.readline()
        except OSError as error:
            log.warning("a process that compiles kernels has ended: %s", error)
        finally:
            self._idle.put(process)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
