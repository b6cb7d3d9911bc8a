"""Every measure, made small: it measures something, whatever the figures are."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest

from tests.labs.benchmarks.live import AGAIN, DEDUPE
from tests.labs.benchmarks.measure import Measure, Missing
from tests.labs.benchmarks.measures import MEASURES, measure_named
from tests.labs.benchmarks.report import Report, earlier
from tests.labs.comparison.contestants import OURS, PLAIN

#: Celery alone, twice, and this library: the others come with the extra `bench`.
THREE = {
    PLAIN.name: (PLAIN.name, {}),
    AGAIN: (PLAIN.name, {}),
    OURS.name: (OURS.name, {}),
}
TWO = {name: THREE[name] for name in (PLAIN.name, OURS.name)}
DEDUPED = {**THREE, DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}})}

SMALL: dict[str, dict[str, Any]] = {
    "trips": {},
    "commands": {"TASKS": 20, "entries": TWO},
    "memory": {},
    "server": {"ROUNDS": 2, "ROUNDS_OF_OTHERS": 1, "EACH": 3},
    "client": {"ROUNDS": 2, "EACH": 3},
    "keys": {"ROUNDS": 2, "EACH": 3},
    "publish": {"ROUNDS": 2, "EACH": 3, "entries": DEDUPED},
    "heartbeat": {"LEASES": 20, "LEASE_MS": 600, "BEATS": 2},
    "wait": {"KEYS": 2, "HELD": {0.05: 2, 0.1: 1}},
    "burst": {"CLIENTS": 5, "REQUESTS": 2, "ROUNDS": 2, "WORK": 0.01},
    "outage": {"ROUNDS": 2, "EACH": 3},
    "growth": {"SIZES": (100, 1_000), "ROUNDS": 2, "EACH": 3},
    "throughput": {"ROUNDS": 1, "CALLS": 1_000, "RECORDS": 1_000},
    "sizing": {"RECORDS": 10_000},
    "slots": {"KEYS": 20_000},
}
#: What these do is done by `commands` and `publish`, too; each would start workers of its own.
LEFT_OUT = {"live", "drain"}


def test_all_are_tried() -> None:
    assert {measure.name for measure in MEASURES} == SMALL.keys() | LEFT_OUT


@pytest.mark.parametrize("name", SMALL)
def test_it_measures(name: str) -> None:
    measure = _small(name)
    done: list[float] = []
    try:
        finding = measure.measure(done.append)
    except Missing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing))
        pytest.skip(str(missing))

    assert finding.figures
    assert all(math.isfinite(each.value) for each in finding.figures)
    assert all(0 <= share <= 1 for share in done)
    assert done == sorted(done)
    # An earlier run's values are found again by their names.
    report = Report({measure: finding}, "", 1)
    assert len(earlier(report.json())[name]) == len(finding.figures)
    assert json.loads(report.json())
    assert all(figure.what in report.figures(measure.page, {}) for figure in finding.figures)
    if measure.counts:
        assert not report.missed()


def _small(name: str) -> Measure:
    measure = type(measure_named(name))()
    for option, value in SMALL[name].items():
        assert hasattr(measure, option)
        setattr(measure, option, value)
    return measure
