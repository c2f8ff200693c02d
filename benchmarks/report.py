"""How every benchmark ends: one JSON line that says what was measured, with what, and where."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "peft", "triton")


def finish(name: str, arguments: dict[str, Any], results: dict[str, Any], out: str | None) -> None:
    """Print the JSON line, and write it to ``out`` (a file) where one is named.

    Where the record was written is no part of it, also where ``arguments`` name it.
    """
    record = {
        "benchmark": name,
        "commit": _commit(),
        "machine": _machine(),
        "versions": {package: found for package in _PACKAGES if (found := _version(package))},
        "arguments": {name: value for name, value in arguments.items() if name != "out"},
        "results": results,
    }
    if out is not None:
        Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changed else "")


def _machine() -> str:
    """Processor and number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
