"""Lines of the log: which request each is about, as text and as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from loramux.cli.logs import JsonFormatter, TextFormatter
from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio


class Lines(logging.Handler):
    """What a formatter makes of all that loramux logs, at the time when it is logged."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    handler, logger = Lines(request.param()), logging.getLogger("loramux")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


async def ask(engine: FakeEngine, *, access_log: bool = True) -> httpx.Response:
    app = create_app(engine, options=ServerOptions(access_log=access_log))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        return await client.post(
            "/v1/completions",
            json={"model": "base", "prompt": "secret"},
            headers={"X-Request-Id": "mine-7"},
        )


async def test_each_request_leaves_a_line_with_its_id(lines: Lines) -> None:
    await ask(FakeEngine())
    [line] = lines.found
    assert "secret" not in line
    if line.startswith("{"):
        entry = json.loads(line)
        assert entry["request_id"] == "mine-7"
        assert entry["logger"] == "loramux.access"
        assert (entry["method"], entry["endpoint"], entry["status"]) == (
            "POST",
            "/v1/completions",
            200,
        )
        assert 0 <= entry["seconds"] < 60
    else:
        assert "INFO loramux.access: POST /v1/completions 200 in 0." in line
        assert line.endswith(" [mine-7]")


async def test_without_the_option_there_is_no_line(lines: Lines) -> None:
    await ask(FakeEngine(), access_log=False)
    assert lines.found == []


async def test_a_fault_of_ours_is_told_with_its_trace_and_id(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a fault")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "submit", broken)
    assert (await ask(engine)).status_code == 500
    first, last = lines.found
    assert "a fault" in first
    assert "mine-7" in first
    assert "500" in last
    if first.startswith("{"):
        assert "Traceback" in json.loads(first)["exception"]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_lines_outside_a_request_have_no_id(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("loramux.x", logging.INFO, "", 0, "line\nbreak %d", (3,), None)
    line = formatter.format(record)
    if line.startswith("{"):
        entry = json.loads(line)
        assert (entry["message"], "request_id" in entry) == ("line\nbreak 3", False)
        assert entry["time"].endswith("+00:00")
    else:
        assert line.endswith("line\nbreak 3")
