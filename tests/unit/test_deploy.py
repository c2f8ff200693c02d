"""What lies in deploy/ speaks of options, routes and metrics that there are."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from loramux.config import EngineOptions, ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
_METRIC = re.compile(r"\bloramux_[a-z_]+")


def yaml_of(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def served_metrics() -> set[str]:
    """Every sample name that the server's /metrics can have."""
    app = create_app(FakeEngine(adapters={"a": "/a"}))
    metrics = app.state.context.metrics
    metrics.count("/health", 200)
    metrics.count_adapter("a")
    metrics.timer("/v1/completions")
    text = generate_latest(metrics.registry).decode()
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
    deployment, _ = yaml_of("kubernetes.yaml")
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    start = re.search(r"^ExecStart=\S+ serve (.*)$", unit, re.MULTILINE)
    assert start is not None
    return {
        "compose": compose["services"]["loramux"]["command"],
        "kubernetes": deployment["spec"]["template"]["spec"]["containers"][0]["args"],
        "systemd": shlex.split(start[1]),
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes", "systemd"])
def test_commands_use_options_that_there_are(where: str) -> None:
    options = [word.partition("=")[0] for word in commands()[where] if word.startswith("-")]
    assert options
    assert set(options) - serve_options() == set()


def test_time_to_stop_is_longer_than_the_servers_own() -> None:
    grace = ServerOptions().shutdown_grace
    deployment, _ = yaml_of("kubernetes.yaml")
    [compose] = yaml_of("compose.yaml")
    unit = (DEPLOY / "loramux.service").read_text(encoding="utf-8")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop is not None
    given = [
        deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        int(compose["services"]["loramux"]["stop_grace_period"].removesuffix("s")),
        int(stop[1]),
    ]
    assert min(given) > grace


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
