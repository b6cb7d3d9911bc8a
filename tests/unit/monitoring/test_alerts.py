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
from celery_idempotent.contrib.prometheus import Metrics

DOCS = Path(__file__).parents[3] / "docs"
GROUPS = yaml.safe_load((DOCS / "alerts.yml").read_text("utf-8"))["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
RUNBOOK = (DOCS / "runbook.md").read_text("utf-8")
#: What ordinary traffic counts, and therefore raises no alert by itself.
ORDINARY = {
    *("run", "replay", "completed", "failed", "released", "interrupted", "replaced"),
    *signals.SHADOW,
}

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def served() -> dict[str, set[str]]:
    """Returns the labels of each metric of a worker."""
    metrics = {}
    for metric in vars(Metrics()).values():
        (described,) = metric.describe()
        metrics[described.name] = {*metric._labelnames, "le"}
    return metrics


def queried(expression: str, metrics: dict[str, set[str]]) -> set[str]:
    """Returns the names in the expression; asserts that their metrics have its labels."""
    names = set()
    for name, matchers in re.findall(r"(celery_idempotent_\w+)(?:\{(.*?)\})?", expression):
        base = re.sub(r"(_total|_bucket|_sum|_count)$", "", name)
        names.add(base)
        assert set(re.findall(r"(\w+)=", matchers)) - {"instance"} <= metrics[base]
    return names


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


@each_rule
def test_a_rule_queries_what_a_worker_serves(rule: dict[str, Any]) -> None:
    # One more is of the main process.
    assert queried(rule["expr"], {**served(), "celery_idempotent_leases_expired": {"task"}})
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


def test_every_metric_and_label_is_served_by_a_worker() -> None:
    metrics = served()
    labels = set().union(*metrics.values()) | {"instance"}
    names = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names |= queried(target["expr"], metrics)
            for grouped in re.findall(r"by \((.*?)\)", target["expr"]):
                assert set(grouped.split(", ")) <= labels
    assert names == metrics.keys()
