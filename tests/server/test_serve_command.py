"""``loramux serve`` as a process, with a fake worker in place of the real one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.test_disconnect import wait_until
from tests.server.test_otlp import collecting

PROGRAM = """
import sys
from functools import partial
from loramux.engine import service_process
from tests.server.fake_service import over_fake_worker

process = service_process.ServiceProcess
service_process.ServiceProcess = lambda build: process(partial(over_fake_worker, build))
from loramux.cli.main import main
main(["serve", "base", "--port", "0", *sys.argv[1:]])
"""


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its URL and what it has logged up to its ready line."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = ""
            while (url := re.search(r"ready at (http://[^ ,]+)", lines)) is None:
                line = process.stderr.readline()
                assert line, lines
                lines += line
            yield process, url[1], lines
        finally:
            process.kill()


def test_ready_line_gives_url_and_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    named = ("--adapter", f"shout={tmp_path / 'a'}", "--adapter", f"pirate={tmp_path / 'b'}")
    with serve(*named, "--max-model-len", "50") as (_, url, line):
        assert "ready at" in line
        assert "base model base, adapters: shout, pirate" in line
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["base", "shout", "pirate"]
        assert models[0]["max_model_len"] == 50


@pytest.mark.parametrize(("named", "name"), [((), "base"), (("--served-model-name", "me"), "me")])
def test_weights_reach_the_engine_with_the_base_as_requests_call_it(
    named: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    weights = ("--adapter-weights", f"shout=4,{name}=3,*=2")
    with serve(*named, *weights, "--adapter", f"shout={tmp_path}") as (_, url, lines):
        assert "the base has weight 3" in lines
        [shout] = httpx.get(f"{url}/v1/adapters").json()["data"]
        assert shout["weight"] == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_requests_finish_and_stops_the_engine(number: signal.Signals) -> None:
    with serve() as (process, url, _):
        body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert list(lines)[-2] == "data: [DONE]"
        assert process.wait(timeout=10) == 0


def test_a_dead_engine_ends_requests_and_the_server() -> None:
    with serve() as (process, url, _):
        body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 90, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            os.kill(int(children), signal.SIGKILL)
            last = [line for line in lines if line]
        assert last[-1] == "data: [DONE]"
        assert "SIGKILL" in json.loads(last[-2].removeprefix("data: "))["error"]["message"]
        assert process.wait(timeout=20) == 1
        assert process.stderr is not None
        assert "error: the engine's process has ended: SIGKILL" in process.stderr.read()


def test_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1:\d+: .*\n", result.stderr)


def test_registry_that_is_none_ends_the_start_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no database, and long enough to be one " * 10)
    command = [sys.executable, "-W", "error", "-c", PROGRAM, "--registry", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_registry_is_made_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "registry"
    with serve("--registry", str(path)):
        assert path.read_bytes().startswith(b"SQLite format 3")


def test_keys_of_the_file_and_the_environment_are_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text('[[key]]\nname = "tenant"\nkey = "sk-tenant"\n')
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", "sk-admin")
    with serve("--keys", str(path)) as (_, url, line):
        assert "keys: tenant, LORAMUX_ADMIN_KEY (admin)" in line
        models = f"{url}/v1/models"
        statuses = [
            httpx.get(models, headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("sk-tenant", "sk-admin", "sk-stranger")
        ]
        assert statuses == [200, 200, 401]


def test_keys_that_cannot_be_read_end_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "tenant"\nkey = "sk-tenant"\nrate = 5\n')
    command = [sys.executable, "-W", "error", "-c", PROGRAM, "--keys", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert re.fullmatch(r"error: keys file .*, key 1 \(tenant\) has an unknown .*\n", done.stderr)


def test_keys_that_change_hold_without_a_new_start_and_at_once_on_sighup(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text('[[key]]\nname = "tenant"\nkey = "sk-old"\n')
    with serve("--keys", str(path)) as (process, url, _):

        def statuses() -> list[int]:
            headers = [{"Authorization": f"Bearer sk-{key}"} for key in ("old", "new")]
            return [httpx.get(f"{url}/v1/models", headers=h).status_code for h in headers]

        assert statuses() == [200, 401]
        path.write_text(path.read_text().replace("old", "new"))
        # To all processes, as a terminal that closes sends it.
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: statuses() == [401, 200])
        headers = {"Authorization": "Bearer sk-new"}
        body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        path.write_text(path.read_text().replace("new", "old"))
        wait_until(lambda: statuses() == [200, 401])


def test_spans_of_requests_are_sent_before_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with collecting() as collector:
        with serve("--otlp-traces-endpoint", collector.url) as (process, url, lines):
            assert f"spans of requests go to {collector.url}" in lines
            body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 5}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=10) == 0
        spans = {span.name: span for span in collector.spans()}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    told = {a.key: a.value for a in spans["llm_request"].attributes}
    assert 0 <= told["gen_ai.latency.time_in_queue"].double_value < 5
    assert told["gen_ai.usage.output_tokens"].int_value == 5


def test_spans_without_their_package_end_the_start_before_the_model_is_loaded() -> None:
    program = f"import sys; sys.modules['opentelemetry.exporter'] = None\n{PROGRAM}"
    command = [sys.executable, "-W", "error", "-c", program]
    endpoint = ["--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]
    done = subprocess.run([*command, *endpoint], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert re.fullmatch(r"error: the package opentelemetry-exporter-\S+ is not .*\n", done.stderr)


def test_a_request_that_the_end_cuts_off_leaves_its_span() -> None:
    with collecting() as collector:
        endpoint = ("--otlp-traces-endpoint", collector.url)
        with serve(*endpoint, "--shutdown-grace", "0", "--max-model-len", "4000") as (
            process,
            url,
            _,
        ):
            body = {"model": "base", "prompt": [1], "max_tokens": 3000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=10) == 0
        [span] = [span for span in collector.spans() if span.name == "llm_request"]
    told = {a.key: a.value.string_value for a in span.attributes}
    assert told["error.type"] == "CancelledError"
