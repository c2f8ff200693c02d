"""``loramux serve`` as a process of its own, as an operator starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY = re.compile(r"ready at (http://\S+?),")


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """Ask it to end as an init system does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def serve(base: Path, adapters: dict[str, Path], *arguments: str) -> Iterator[ServerProcess]:
    """A server on a free port, ready when this yields."""
    named = [f"--adapter={name}={path}" for name, path in adapters.items()]
    command = [sys.executable, "-m", "loramux", "serve", str(base), "--port=0", *named]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        yield ServerProcess(_wait_until_ready(process), process)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := _READY.search(line):
            return found[1]
    raise AssertionError("the server ended before it was ready:\n" + "".join(seen))
