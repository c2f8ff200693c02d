"""The two real models, their adapters and their golden outputs, for every folder of tests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from pathlib import Path

import hypothesis
import pytest

if shutil.which("nvidia-smi") is None:
    # Before anything imports triton, whose own functions are made for the interpreter or not.
    os.environ["TRITON_INTERPRET"] = "1"

from loramux.demo.adapters import find_adapters
from loramux.demo.base import demo_base, publish
from tests.fake_clock import FakeClock
from tests.golden.load import Golden, load_golden
from tests.interpreter import rows_apart as rows_apart
from tests.tiny import make_tiny

TESTS = Path(__file__).parent
CHECKOUT = TESTS.parent

hypothesis.settings.register_profile("plain", derandomize=True, deadline=None)
hypothesis.settings.register_profile("all", max_examples=2_000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also what is marked slow, and many more drawn examples, new ones at each run",
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "plain")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: scripts/test --all runs it")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def clock() -> FakeClock:
    """For what takes its time from a clock that it is given."""
    return FakeClock()


@pytest.fixture
def anyio_backend() -> str:
    """What tests that are coroutines run on: the engine needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """A trained Llama of 852,608 weights; made once per version of ``make_tiny.py``."""
    digest = hashlib.sha256(Path(make_tiny.__file__).read_bytes()).hexdigest()[:16]
    folder = CHECKOUT / ".cache" / f"tiny-{digest}"
    if not folder.is_dir():
        with contextlib.redirect_stdout(io.StringIO()):
            publish(folder, lambda target: make_tiny.make_base(str(target)))
    return folder


@pytest.fixture(scope="session")
def smollm2_base() -> Path:
    """SmolLM2-135M-Instruct in bfloat16; the first call on a machine takes half a minute."""
    return demo_base()


@pytest.fixture(scope="session")
def tiny_golden() -> Golden:
    return load_golden("tiny")


@pytest.fixture(scope="session")
def smollm2_golden() -> Golden:
    return load_golden("smollm2")


@pytest.fixture(scope="session")
def tiny_adapters() -> dict[str, Path]:
    return {name: Path(path) for name, path in find_adapters(TESTS / "tiny").items()}


@pytest.fixture(scope="session")
def smollm2_adapters() -> dict[str, Path]:
    return {
        name: Path(path) for name, path in find_adapters(CHECKOUT / "examples/adapters").items()
    }
