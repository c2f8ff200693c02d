"""A process that compiles Triton kernels into Triton's cache, and needs no GPU for that.

``python -m loramux.ops.compile_worker TARGET``: the fields of Triton's ``GPUTarget`` as JSON. Each
line of input is a ``Job`` as JSON; an empty line says that it is done, also where the kernel does
not compile: whoever wants it will find out.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
from typing import IO, Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One kernel, as ``triton.JITFunction.preload`` takes it."""

    module: str
    kernel: str
    specialization: str


class NoDevice:
    """Stands for Triton's driver where kernels are compiled and none runs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use_no_device(target: GPUTarget) -> None:
    """Compile for a GPU that is not there."""
    driver: Any = triton.runtime.driver
    driver.set_active(NoDevice(target))


def main(target: GPUTarget, jobs: IO[str], answers: IO[str]) -> None:
    """Carry out jobs until there are no more."""
    use_no_device(target)
    for line in jobs:
        job = Job(*json.loads(line))
        try:
            getattr(importlib.import_module(job.module), job.kernel).preload(job.specialization)
        except Exception:
            log.warning("%s could not be compiled ahead", job.kernel, exc_info=True)
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C goes to all processes of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever is printed on the way is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    main(GPUTarget(*json.loads(sys.argv[1])), sys.stdin, answers)
