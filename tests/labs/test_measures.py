"""Runs every measure with small parameters; checks the form of the figures, not their values."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest

from labs.benchmarks.environments import CELERY_AND_OURS, CONTROL, DEDUPE, OURS_BY_DEFAULT
from labs.benchmarks.measure import Measure, MissingDependency
from labs.benchmarks.measures import MEASURES, find_measure
from labs.benchmarks.report import Report, parse_values
from labs.comparison.contestants import OURS, PLAIN

#: Without the contestants of the dependency group `bench`.
WITH_CONTROL = {PLAIN.name: (PLAIN.name, {}), CONTROL: (PLAIN.name, {}), **OURS_BY_DEFAULT}
WITHOUT_CONTROL = {name: WITH_CONTROL[name] for name in (PLAIN.name, OURS.name)}
DEDUPED = {
    **WITH_CONTROL,
    DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}}),
}

SMALL: dict[str, dict[str, Any]] = {
    "trips": {},
    "commands": {"TASKS": 20, "entries": WITHOUT_CONTROL},
    "memory": {},
    "trace": {"ROUNDS": 2, "EACH": 3, "entries": CELERY_AND_OURS},
    "process": {"IMPORTS": 1, "WORKERS": 1, "TASKS": 3},
    "sql": {"ROUNDS": 2, "EACH": 3},
    "soak": {"MINUTES": 0.1, "SAMPLE_INTERVAL": 0.5},
    "server": {"ROUNDS": 2, "ROUNDS_OF_OTHERS": 1, "EACH": 3},
    "client": {"ROUNDS": 2, "EACH": 3},
    "keys": {"ROUNDS": 2, "EACH": 3},
    "publish": {"ROUNDS": 2, "EACH": 3, "entries": DEDUPED},
    "heartbeat": {"LEASES": 20, "LEASE_MS": 600, "HEARTBEATS": 2},
    "wait": {"KEYS": 2, "DURATIONS": {0.05: 2, 0.1: 1}},
    "burst": {"CLIENTS": 5, "REQUESTS": 2, "ROUNDS": 2, "WORK": 0.01},
    "outage": {"ROUNDS": 2, "EACH": 3},
    "growth": {"SIZES": (100, 1_000), "ROUNDS": 2, "EACH": 3},
    "throughput": {"ROUNDS": 1, "CALLS": 1_000, "RECORDS": 1_000},
    "sizing": {"RECORDS": 10_000},
    "slots": {"KEYS": 20_000},
    "wake": {
        "SERIES": {(5, 0.2, 2): 5},
        "PAIRS": {0.2: 1},
        "WORKERS_OF_PAIRS": 1,
        "DUPLICATES": 3,
        "BURSTS": 1,
        "BURST_SECONDS": 0.5,
    },
}
#: Covered by `commands` and `publish`; each of them would start its own workers.
NOT_RUN = {"live", "drain"}


def test_every_measure_is_listed() -> None:
    assert {measure.name for measure in MEASURES} == SMALL.keys() | NOT_RUN


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.exhaustive
@pytest.mark.slow
def test_measure_has_figures(name: str) -> None:
    measure = _small(name)
    done: list[float] = []
    try:
        result = measure.measure(done.append)
    except MissingDependency as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))

    assert result.figures
    assert all(math.isfinite(each.value) for each in result.figures)
    assert all(0 <= share <= 1 for share in done)
    assert done == sorted(done)
    # Labels are unique, so that the values of an earlier run are matched correctly.
    report = Report({measure: result}, "", 1)
    assert len(parse_values(report.json())[name]) == len(result.figures)
    assert json.loads(report.json())
    assert all(
        figure.label in report.figures(measure.page, {}, measure.section)
        for figure in result.figures
    )
    if measure.is_exact:
        assert not report.missed()


def _small(name: str) -> Measure:
    measure = type(find_measure(name))()
    for option, value in SMALL[name].items():
        assert hasattr(measure, option)
        setattr(measure, option, value)
    return measure
