"""Alert rules and the Grafana dashboard agree with the metrics of a worker, and the runbook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("prometheus_client")

from celery_idempotent import signals
from celery_idempotent.cli import idempotency
from celery_idempotent.contrib.prometheus import Metrics

DOCS = Path(__file__).parents[3] / "docs"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
RUNBOOK = (DOCS / "runbook.md").read_text("utf-8")
#: What ordinary traffic counts, and therefore raises no alert by itself.
ORDINARY = {*("run", "replay", "completed", "failed", "released", "interrupted"), *signals.SHADOW}

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


@each_rule
def test_a_rule_has_a_severity_a_summary_and_an_entry(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    row = re.search(rf"^\| \[{name}\]\(#{name.lower()}\) \| (\w+) \|", RUNBOOK, re.M)
    assert row
    assert row[1] == rule["labels"]["severity"]


def test_the_commands_in_the_runbook_exist() -> None:
    commands = re.findall(r"`celery -A shop idempotency (\w+)(.*?)`", RUNBOOK)
    assert commands
    for name, arguments in commands:
        options = {o for parameter in idempotency.commands[name].params for o in parameter.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= options


@each_rule
def test_a_rule_queries_what_a_worker_serves(rule: dict[str, Any]) -> None:
    served = {"celery_idempotent_leases_expired": {"task"}}  # of the main process
    for metric in vars(Metrics()).values():
        (described,) = metric.describe()
        served[described.name] = {*metric._labelnames, "le"}
    selectors = re.findall(r"(celery_idempotent_\w+)(?:\{(.*?)\})?", rule["expr"])
    assert selectors
    for name, matchers in selectors:
        short = re.sub(r"(_total|_bucket|_sum|_count)$", "", name)
        assert set(re.findall(r"(\w+)=", matchers)) <= served[short]
    for label in re.findall(r"by \((.*?)\)", rule["expr"]):
        assert label in ("task", "instance", "instance, le")
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        assert f"by ({label}" in rule["expr"]


def test_every_value_of_a_label_raises_an_alert_or_is_ordinary() -> None:
    known = {
        "decision": {*signals.DECISIONS} - {"refused"},  # these are counted by reason
        "outcome": {*signals.OUTCOMES},
        "reason": {*signals.REASONS},
    }
    expressions = " ".join(rule["expr"] for rule in RULES)
    for label, values in known.items():
        queried = set()
        for matcher in re.findall(rf'\b{label}=~?"(.*?)"', expressions):
            queried |= set(matcher.split("|"))
        assert queried - {"would_.+"} <= values
        assert values - queried <= ORDINARY, label


DASHBOARD = json.loads((DOCS / "grafana.json").read_text("utf-8"))
_METRIC = r"(celery_idempotent_\w+)(?:\{(.*?)\})?"
_SUFFIXES = r"(_total|_bucket|_sum|_count)?$"


def test_every_metric_and_label_is_served_by_a_worker() -> None:
    served = {}
    for metric in vars(Metrics()).values():
        (described,) = metric.describe()
        served[described.name] = {*metric._labelnames, "le", "instance"}
    queried = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(_METRIC, target["expr"]):
                short = re.sub(_SUFFIXES, "", name)
                queried.add(short)
                assert set(re.findall(r"(\w+)=", labels)) <= served[short]
            for labels in re.findall(r"by \((.*?)\)", target["expr"]):
                assert set(labels.split(", ")) <= set().union(*served.values())
    assert queried == served.keys()
