"""Runs every measure with small parameters; checks the form of the figures, not their values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from labs.benchmarks.environments import CONTROL, DEDUPE, OURS_BY_DEFAULT
from labs.benchmarks.measure import Measure
from labs.benchmarks.measures import MEASURES, find_measure
from labs.benchmarks.report import Report
from labs.comparison.contestants import OURS, PLAIN

#: Without the contestants of the dependency group `bench`.
WITH_CONTROL = {PLAIN.name: (PLAIN.name, {}), CONTROL: (PLAIN.name, {}), **OURS_BY_DEFAULT}
DEDUPE_PUBLISH = {"task_options": {"idempotency_dedupe_publish": True}}
DEDUPED = {**WITH_CONTROL, DEDUPE: (OURS.name, DEDUPE_PUBLISH)}

SMALL: dict[str, dict[str, Any]] = {
    "memory": {},
    "drain": {"RESTARTS": 1, "ROUNDS": 2, "TASKS": 20, "entries": WITH_CONTROL},
    "live": {"RESTARTS": 1, "ROUNDS": 2, "EACH": 2, "entries": WITH_CONTROL},
    "publish": {"ROUNDS": 2, "EACH": 3, "entries": DEDUPED},
    "soak": {"MINUTES": 0.1, "SAMPLE_INTERVAL": 0.5},
    "wake": {"SERIES": {(5, 0.2, 2): 5}, "PAIRS": {0.2: 1}, "WORKERS_OF_PAIRS": 1}
    | {"DUPLICATES": 3, "BURSTS": 1, "BURST_SECONDS": 0.5},
}


def test_every_measure_is_listed() -> None:
    assert {measure.name for measure in MEASURES} == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.exhaustive
@pytest.mark.slow
def test_measure_has_figures(name: str) -> None:
    measure = _small(name)
    result = measure.measure()

    assert result.figures
    assert all(math.isfinite(each.value) for each in result.figures)
    report = Report({measure: result}, "")
    assert len(json.loads(report.json())["measures"][name]["figures"]) == len(result.figures)
    assert all(figure.label in report.figures(measure.section) for figure in result.figures)
    if name == "memory":
        assert all(figure.is_met is not False for figure in result.figures)


def _small(name: str) -> Measure:
    measure = type(find_measure(name))()
    for option, value in SMALL[name].items():
        assert hasattr(measure, option)
        setattr(measure, option, value)
    return measure
