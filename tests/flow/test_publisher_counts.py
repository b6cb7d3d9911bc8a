"""What a process that only publishes calls signals and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from celery import Celery
from prometheus_client import CollectorRegistry

from celery_idempotent import IdempotentTask, KeyReusedError, KeyRuleError, signals
from celery_idempotent.contrib import prometheus


@pytest.fixture
def charge(broker_app: Celery, task: Callable[..., IdempotentTask]) -> IdempotentTask:
    """A task whose calls are published once for each order."""

    def charge(self: Any, order: int, amount: int = 1) -> None: ...

    return task(charge, key="{order:d}", dedupe_publish=True)


@pytest.fixture
def registry(restored_receivers: None) -> CollectorRegistry:
    registry = CollectorRegistry()
    prometheus.connect(registry)
    return registry


def test_a_call_that_is_not_published_is_signalled_and_counted(
    charge: IdempotentTask, registry: CollectorRegistry
) -> None:
    seen: list[dict[str, Any]] = []
    signals.deduplicated.connect(lambda **details: seen.append(details), weak=False)

    first = charge.delay(7)
    second = charge.delay(7)

    assert second.id == first.id
    ((details),) = seen
    assert details["sender"] is charge
    assert details["record"].task_id == first.id
    assert details["key"] == str(charge.idempotency_key_of(7))
    labels = {"task": charge.name}
    assert registry.get_sample_value("celery_idempotent_deduplicated_total", labels) == 1
    assert registry.get_sample_value("celery_idempotent_decisions_total", labels) is None


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        pytest.param((7, 2), KeyReusedError, "reused", id="other arguments"),
        pytest.param(("seven",), KeyRuleError, "key_rule", id="a rule that raises"),
    ],
)
def test_a_call_that_is_refused_at_the_publisher_is_signalled_and_counted(
    charge: IdempotentTask,
    registry: CollectorRegistry,
    arguments: tuple[Any, ...],
    error: type[Exception],
    reason: str,
) -> None:
    seen: list[dict[str, Any]] = []
    signals.refused.connect(lambda **details: seen.append(details), weak=False)
    charge.delay(7)

    with pytest.raises(error) as raised:
        charge.delay(*arguments)

    ((details),) = seen
    assert (details["reason"], details["at"]) == (reason, "publish")
    assert details["error"] is raised.value
    labels = {"task": charge.name, "reason": reason}
    assert registry.get_sample_value("celery_idempotent_refused_total", labels) == 1
