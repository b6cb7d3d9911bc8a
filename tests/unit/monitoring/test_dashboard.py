"""The Grafana dashboard and the operations guide agree with the metrics that a worker serves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from celery_idempotent.contrib.prometheus import Metrics

DOCS = Path(__file__).parents[3] / "docs"
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
