"""Spans, with Celery's own instrumentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_idempotent.contrib.opentelemetry import IdempotencyInstrumentor
from tests.monitoring.conftest import Shop


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What is traced, Celery's spans included."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentors = CeleryInstrumentor(), IdempotencyInstrumentor()
    for instrumentor in instrumentors:
        instrumentor.instrument(tracer_provider=provider)
    yield exporter
    for instrumentor in instrumentors:
        instrumentor.uninstrument()
    provider.shutdown()


def last(spans: InMemorySpanExporter) -> ReadableSpan:
    """The span of the task that ran last."""
    return [span for span in spans.get_finished_spans() if span.name.startswith("run/")][-1]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {
        name.removeprefix("idempotency."): value
        for name, value in (span.attributes or {}).items()
        if name.startswith("idempotency.")
    }


def test_a_run(shop: Shop, spans: InMemorySpanExporter) -> None:
    shop.charge.apply((42, 999))

    record = shop.charge.idempotency_record(42, 999)
    assert attributes(last(spans)) == {
        "decision": "run",
        "key": record.key,
        "token": record.token,
        "attempt": 1,
        "outcome": "completed",
    }


@pytest.mark.parametrize("amount", [999, 13], ids=["result", "error"])
def test_a_replay_links_to_the_execution_that_it_repeats(
    shop: Shop, spans: InMemorySpanExporter, amount: int
) -> None:
    first = shop.charge.apply((42, amount))
    original = last(spans)
    shop.charge.apply((42, amount))

    replay = last(spans)
    assert attributes(replay)["decision"] == "replay"
    assert attributes(replay)["first_task_id"] == first.id
    (link,) = replay.links
    assert original.context is not None
    assert link.context.span_id == original.context.span_id
    assert link.context.trace_id == original.context.trace_id
    assert replay.context != original.context


def test_a_takeover_says_how_long_the_key_stood_still(
    shop: Shop, spans: InMemorySpanExporter
) -> None:
    shop.begin(shop.charge, 42, 999, lease_ms=0)
    shop.charge.apply((42, 999))

    told = attributes(last(spans))
    assert (told["decision"], told["attempt"]) == ("takeover", 2)
    assert 0 <= told["orphaned_seconds"] < 60


def test_a_conflict(shop: Shop, spans: InMemorySpanExporter) -> None:
    shop.begin(shop.charge, 42, 999)
    shop.charge.apply((42, 999))

    assert attributes(last(spans))["decision"] == "conflict"


def test_an_outcome_that_nobody_traced_has_no_origin(shop: Shop) -> None:
    shop.charge.apply((42, 999))

    assert shop.charge.idempotency_record(42, 999).traceparent == ""
