"""``loramux demo`` as a command: options, output and exit code."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from loramux.cli import demo as command
from loramux.cli.demo import demo, engine_options
from loramux.config import EngineOptions
from loramux.demo import serve as demo_serve
from loramux.demo.answers import Grid
from loramux.demo.serve import curl_examples
from loramux.errors import ConfigError
from tests.unit.scripted_engine import ScriptedEngine

ADAPTERS = ("emoji", "json", "pirate", "shout", "spanish", "yesno")


class Build:
    """Takes the place of ``loramux.engine.build`` and remembers what was asked of it."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.calls: list[tuple[str, EngineOptions, dict[str, str], str | None]] = []

    def build_async_engine(
        self,
        base: str,
        options: EngineOptions,
        adapters: Mapping[str, str],
        served_name: str | None = None,
    ) -> ScriptedEngine:
        self.calls.append((base, options, dict(adapters), served_name))
        return self.engine


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    script: dict[str | None, list[str]] = {name: [name, " says hi"] for name in ADAPTERS}
    built = Build(ScriptedEngine(script | {None: ["hi"]}, max_step_adapters=6))
    module: Any = ModuleType("loramux.engine.build")
    module.build_async_engine = built.build_async_engine
    monkeypatch.setitem(sys.modules, "loramux.engine.build", module)
    monkeypatch.setattr(command, "demo_base", lambda announce: Path("/models/smollm2"))
    return built


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, list(arguments))


def test_pipe_gets_21_lines_and_the_summary(build: Build) -> None:
    lines = invoke().output.splitlines()
    assert len(lines) == 22
    assert "[pirate] Is the sky blue? -> pirate says hi" in lines
    assert lines[-1].startswith("21 requests | adapters in the same step: 6 + base | ")


def test_good_run_exits_with_0_and_stops_the_engine(build: Build) -> None:
    assert invoke().exit_code == 0
    assert build.engine.log[0] == "start"
    assert build.engine.log[-1] == "stop"


def test_run_whose_adapters_never_met_exits_with_1(build: Build) -> None:
    build.engine.max_step_adapters = 5
    assert invoke().exit_code == 1


def test_failed_answer_exits_with_1(build: Build) -> None:
    build.engine.dies = frozenset({"json"})
    assert invoke().exit_code == 1


def test_engine_gets_base_adapters_and_name(build: Build) -> None:
    invoke()
    base, _, adapters, served_name = build.calls[0]
    assert (base, served_name) == ("/models/smollm2", "SmolLM2-135M-Instruct")
    assert tuple(adapters) == ADAPTERS


def test_given_prompts_replace_the_default_ones(build: Build) -> None:
    lines = invoke("--prompt", "Who are you?", "--prompt", "Why?").output.splitlines()
    assert len(lines) == 15
    assert lines[-1].startswith("14 requests | ")
    assert sum("Who are you? -> " in line for line in lines) == 7
    assert sum("Why? -> " in line for line in lines) == 7


def test_max_tokens_reaches_every_request(build: Build) -> None:
    invoke("--max-tokens", "7")
    assert {request.params.max_tokens for request in build.engine.requests} == {7}


def test_folder_without_adapters_is_an_error_before_anything_is_loaded(
    build: Build, tmp_path: Path
) -> None:
    result = invoke("--adapters", str(tmp_path))
    assert isinstance(result.exception, ConfigError)
    assert build.calls == []


def test_taken_port_is_an_error_before_anything_is_loaded(build: Build) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = invoke("--serve", "--port", str(taken.getsockname()[1]))
    assert isinstance(result.exception, ConfigError)
    assert "--port" in str(result.exception)
    assert build.calls == []


def test_serve_goes_on_with_the_same_engine_and_stops_it_afterwards(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve_app(app: Any, sock: socket.socket) -> None:
        assert app.state.context.engine is build.engine
        assert "stop" not in build.engine.log
        build.engine.log.append(f"served on {sock.getsockname()[1]}")

    monkeypatch.setattr(demo_serve, "serve_app", serve_app)
    result = invoke("--serve", "--port", "0")
    assert result.exit_code == 0
    assert build.engine.log[-2:] == [f"served on {_port(result.output)}", "stop"]


def test_step_has_room_for_every_request_of_a_large_grid() -> None:
    options = engine_options(Grid(tuple(f"a{n}" for n in range(40)), ("one", "two", "three")))
    assert options.adapters.max_loras == 40
    assert options.scheduler.max_num_seqs == 123
    assert options.scheduler.max_step_tokens >= 123 * 100


def test_curl_examples_survive_quotes_in_the_prompt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        text = curl_examples(sock, ("base-name", "json", "pirate"), 'What\'s "new"?')
    command_line = shlex.split(text.splitlines()[-1])
    assert command_line[:2] == ["curl", f"http://127.0.0.1:{_port(text)}/v1/chat/completions"]
    body = json.loads(command_line[-1])
    assert body["model"] == "pirate"
    assert body["messages"] == [{"role": "user", "content": 'What\'s "new"?'}]


def _port(text: str) -> int:
    return int(text.split("127.0.0.1:")[1].split("/")[0])
