"""What lies in deploy/ speaks of options, routes and metrics that there are."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from loramux.config import EngineOptions, ServerOptions
from loramux.errors import ConfigError
from loramux.server import otlp, spans
from loramux.server.app import create_app
from loramux.server.key_file import read_keys
from loramux.server.keys import Key, Keyring
from loramux.testing import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
_METRIC = re.compile(r"\bloramux_[a-z_]+")


def yaml_of(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def served_metrics() -> set[str]:
    """Every sample name that the server's /metrics can have."""
    keyring = Keyring([Key(name="k", digest=bytes(32))], open_inference=False)
    app = create_app(FakeEngine(adapters={"a": "/a"}), keyring=keyring)
    metrics = app.state.context.metrics
    metrics.count("/health", 200)
    metrics.count_adapter("a")
    metrics.count_tokens("a", 1)
    metrics.timer("/v1/completions")
    text = asyncio.run(metrics.text()).decode()
    found = {f.name: f.type for f in text_string_to_metric_families(text)}
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
    return {name + suffix for name, kind in found.items() for suffix in suffixes[kind]}


def serve_options() -> set[str]:
    groups = [ServerOptions, *(f.default_factory for f in fields(EngineOptions))]
    names = {f.name for group in groups for f in fields(group)}  # type: ignore[arg-type]
    return {"--" + name.replace("_", "-") for name in names} | {"--adapter"}


@pytest.mark.parametrize("file", ["grafana/loramux.json", "prometheus/alerts.yml"])
def test_metrics_that_are_asked_for_are_served(file: str) -> None:
    asked = set(_METRIC.findall((DEPLOY / file).read_text(encoding="utf-8")))
    assert len(asked) >= 5
    assert asked - served_metrics() == set()


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    dashboard = json.loads((DEPLOY / "grafana/loramux.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len(panels)
    assert all(panel["targets"] and panel["title"] for panel in panels)
    [source] = yaml_of("grafana/provisioning/datasources/prometheus.yaml")
    uids = {panel["datasource"]["uid"] for panel in panels}
    assert uids == {source["datasources"][0]["uid"]}


def test_every_alert_says_what_to_do() -> None:
    [alerts] = yaml_of("prometheus/alerts.yml")
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_probes_ask_for_routes_that_there_are() -> None:
    routes = create_app(FakeEngine()).openapi()["paths"].keys()
    deployment, service = yaml_of("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    asked = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in KINDS}
    assert asked | {pod["metadata"]["annotations"]["prometheus.io/path"]} <= routes
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert set(re.findall(r"127\.0\.0\.1:8000(/\w+)", dockerfile)) <= routes


KINDS = ("startup", "liveness", "readiness")


def commands() -> dict[str, list[str]]:
    [compose] = yaml_of("compose.yaml")
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    start = re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    assert start is not None
    return {
        "compose": compose["services"]["loramux"]["command"],
        "kubernetes": pod()["containers"][0]["args"],
        "systemd": shlex.split(start[1]),
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes", "systemd"])
def test_commands_use_options_that_there_are(where: str) -> None:
    options = [word.partition("=")[0] for word in commands()[where] if word.startswith("-")]
    assert options
    assert set(options) - serve_options() == set()


def test_what_is_compiled_at_a_start_outlives_it() -> None:
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    kept = re.search(r"^CacheDirectory=(\S+)$", unit, re.MULTILINE)
    assert kept is not None
    assert f"Environment=XDG_CACHE_HOME=/var/cache/{kept[1]}" in unit
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    [home] = {*re.findall(r"XDG_CACHE_HOME=(\S+)", dockerfile)}
    [container] = pod()["containers"]
    [compose] = yaml_of("compose.yaml")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert home in mounts
    assert f"state:{home}" in compose["services"]["loramux"]["volumes"]


def pod() -> dict[str, Any]:
    deployment, _ = yaml_of("kubernetes.yaml")
    return deployment["spec"]["template"]["spec"]


def keys_that_are_mounted() -> dict[str, str]:
    """Where each platform puts the file of keys."""
    [compose] = yaml_of("compose.yaml")
    [secret] = compose["services"]["loramux"]["secrets"]
    assert "file" in compose["secrets"][secret]
    [container] = pod()["containers"]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == "keys"]
    assert "subPath" not in mount, "a change would not arrive"
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    credential = re.search(r"^LoadCredential=([^:]+):/", unit, re.MULTILINE)
    assert credential is not None
    return {
        "compose": f"/run/secrets/{secret}",
        "kubernetes": f"{mount['mountPath']}/keys.toml",
        "systemd": f"${{CREDENTIALS_DIRECTORY}}/{credential[1]}",
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes", "systemd"])
def test_each_command_reads_the_keys_where_they_are_mounted(where: str) -> None:
    words = " ".join(commands()[where]).replace("=", " ").split()
    assert words[words.index("--keys") + 1] == keys_that_are_mounted()[where]


def test_keys_that_have_not_been_filled_in_end_the_start_and_say_so() -> None:
    with pytest.raises(ConfigError, match=r"key 1: sha256 must be 64 hexadecimal digits: printf"):
        read_keys(str(DEPLOY / "keys.toml"), {})


def test_keys_that_have_been_filled_in_are_let_in(tmp_path: Path) -> None:
    text = (DEPLOY / "keys.toml").read_text(encoding="utf-8")
    assert text.count('sha256 = "replace"') == text.count("[[key]]")
    for digit in "01":
        text = text.replace('"replace"', f'"{digit * 64}"', 1)
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(text)
    assert [(key.infer, key.admin) for key in read_keys(str(path), {}).keys] == [
        (True, False),
        (False, True),
    ]


def test_the_mode_of_the_secret_is_one_that_plain_keys_may_have(tmp_path: Path) -> None:
    [volume] = [v for v in pod()["volumes"] if v["name"] == "keys"]
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "a"\nkey = "sk-plain"\n')
    path.chmod(volume["secret"]["defaultMode"])
    assert oct(path.stat().st_mode & 0o777) == "0o440"
    read_keys(str(path), {})


def test_the_pod_runs_as_the_user_of_the_image() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    uids = re.findall(r"useradd --uid (\d+) ", dockerfile)
    context = pod()["securityContext"]
    assert {context[f] for f in ("runAsUser", "runAsGroup", "fsGroup")} == {int(u) for u in uids}
    assert uids[0] in (DEPLOY / "compose.yaml").read_text(encoding="utf-8")


def test_the_first_process_of_every_image_passes_signals_on() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    entries = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    assert len(entries) == dockerfile.count("--no-install-recommends") == 2
    assert {tuple(json.loads(entry)) for entry in entries} == {("tini", "--", "loramux", "serve")}
    assert len(re.findall(r"--no-install-recommends .*\btini\b", dockerfile)) == 2


def test_time_to_stop_is_longer_than_the_servers_own() -> None:
    grace = ServerOptions().shutdown_grace + otlp._FLUSH_SECONDS + spans._CUT_OFF_SECONDS
    [compose] = yaml_of("compose.yaml")
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    given = [
        pod()["terminationGracePeriodSeconds"],
        int(compose["services"]["loramux"]["stop_grace_period"].removesuffix("s")),
        int(stop[1]),
    ]
    assert min(given) > grace + 10, "the engine's last step takes some, too"


def test_files_that_are_mounted_and_copied_are_there() -> None:
    [compose] = yaml_of("compose.yaml")
    mounts = [v for s in compose["services"].values() for v in s["volumes"] if v.startswith("./")]
    copied = re.findall(
        r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    assert mounts
    assert copied
    assert all((DEPLOY / mount.split(":")[0]).exists() for mount in mounts)
    assert all((DEPLOY.parent / path).exists() for line in copied for path in line.split())
    [prometheus] = yaml_of("prometheus/prometheus.yml")
    assert all((DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"])
