"""Prometheus metrics of idempotent functions and blocks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from celery_idempotent import Idempotency, KeyReusedError, KeyRuleError
from celery_idempotent.contrib.prometheus import Metrics
from celery_idempotent.core.lease.heartbeat import heartbeat


@pytest.fixture
def metrics(restored_receivers: None) -> Metrics:
    metrics = Metrics()
    metrics.connect()
    return metrics


def values(counter: Any) -> dict[str, float]:
    """The values of a counter by its labels."""
    samples = [each for metric in counter.collect() for each in metric.samples]
    totals = (each for each in samples if each.name.endswith("_total"))
    return {" ".join(each.labels.values()): each.value for each in totals}


def test_functions_and_blocks_are_counted(idem: Idempotency, metrics: Metrics, key: str) -> None:
    @idem.idempotent(name="charge")
    def charge(order: str) -> str:
        return order

    charge(key)
    charge(key)
    with idem.execution(key) as execution:
        execution.complete()

    assert values(metrics._decisions) == {"charge run": 1, "charge replay": 1, "calls run": 1}


def test_replaced_heartbeats_are_counted(metrics: Metrics) -> None:
    heartbeat.on_replaced()

    assert values(metrics._heartbeats_replaced) == {"": 1}


def test_refusals_are_counted_by_reason(idem: Idempotency, metrics: Metrics, key: str) -> None:
    @idem.idempotent(name="refund", key=lambda order: order["id"])
    def refund(order: dict[str, str]) -> None: ...

    with pytest.raises(KeyRuleError) as refusal:
        refund({})
    with idem.execution(key, fingerprint=1) as execution:
        execution.complete()
    with pytest.raises(KeyReusedError), idem.execution(key, fingerprint=2):
        pass
    with pytest.raises(KeyRuleError):
        idem.execution(object())

    assert isinstance(refusal.value.__cause__, KeyError)
    refused = values(metrics._refused)
    assert refused == {"refund key_rule": 1, "calls reused": 1, "calls key_rule": 1}
    assert values(metrics._decisions) == {"refund refused": 1, "calls run": 1, "calls refused": 2}


def test_each_entry_of_a_batch_is_counted(idem: Idempotency, metrics: Metrics, key: str) -> None:
    keys = [f"{key} {number}" for number in range(4)]
    with idem.execution(keys[0]) as execution:
        execution.complete()
    with idem.execution(keys[1]), idem.begin_many(keys) as batch:
        batch.complete_many()

    assert values(metrics._decisions) == {"calls run": 4, "calls replay": 1, "calls conflict": 1}
