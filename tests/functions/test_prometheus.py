"""Prometheus metrics of idempotent functions and blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("prometheus_client")

from celery.signals import task_postrun

from celery_idempotent import Idempotency, signals
from celery_idempotent.contrib.prometheus import Metrics


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    connected = [*signals.ALL, signals.begin_replied, task_postrun]
    receivers = [list(signal.receivers) for signal in connected]
    metrics = Metrics()
    metrics.connect()
    yield metrics
    for signal, before in zip(connected, receivers, strict=True):
        signal.receivers = before
        signal.sender_receivers_cache.clear()


def test_functions_and_blocks_are_counted_by_name(
    idem: Idempotency, metrics: Metrics, key: str
) -> None:
    @idem.idempotent(name="shop.charge")
    def charge(order: str) -> str:
        return order

    charge(key)
    charge(key)
    with idem.execution(key) as execution:
        execution.complete()

    decisions = metrics._decisions
    samples = {
        tuple(sample.labels.values()): sample.value
        for metric in decisions.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert samples == {
        ("shop.charge", "run"): 1,
        ("shop.charge", "replay"): 1,
        ("calls", "run"): 1,
    }
