"""The Grafana dashboard asks for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from celery_idempotent.contrib.prometheus import Metrics

DASHBOARD = json.loads((Path(__file__).parents[3] / "docs/grafana.json").read_text("utf-8"))
_METRIC = r"(celery_idempotent_\w+)(?:\{(.*?)\})?"
_SUFFIXES = r"(_total|_bucket|_sum|_count)?$"


def test_every_name_and_label_is_one_that_a_worker_serves() -> None:
    served = {}
    for metric in vars(Metrics()).values():
        (described,) = metric.describe()
        served[described.name] = {*metric._labelnames, "le", "instance"}
    asked = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name, labels in re.findall(_METRIC, target["expr"]):
                short = re.sub(_SUFFIXES, "", name)
                asked.add(short)
                assert set(re.findall(r"(\w+)=", labels)) <= served[short]
            for labels in re.findall(r"by \((.*?)\)", target["expr"]):
                assert set(labels.split(", ")) <= set().union(*served.values())
    assert asked == served.keys()


def test_its_panels_do_not_overlap() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
