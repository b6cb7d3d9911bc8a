"""Attributes and links of the spans that Celery's instrumentation opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter as Spans

from celery_idempotent.contrib.opentelemetry import IdempotencyInstrumentor
from tests.monitoring.conftest import Shop


@pytest.fixture
def spans() -> Iterator[Spans]:
    """The exporter of all spans, Celery's included."""
    exporter = Spans()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentors = CeleryInstrumentor(), IdempotencyInstrumentor()
    for instrumentor in instrumentors:
        instrumentor.instrument(tracer_provider=provider)
    yield exporter
    for instrumentor in instrumentors:
        instrumentor.uninstrument()
    provider.shutdown()


def last_span(spans: Spans) -> ReadableSpan:
    """Returns the span of the task that ran last."""
    return [span for span in spans.get_finished_spans() if span.name.startswith("run/")][-1]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {
        name.removeprefix("idempotency."): value
        for name, value in (span.attributes or {}).items()
        if name.startswith("idempotency.")
    }


def test_a_run_sets_attributes(shop: Shop, spans: Spans) -> None:
    type(shop.charge).idempotency_label = "order {order_id}"
    type(shop.charge)._configurations = {}
    shop.charge.apply((42, 999))

    record = shop.charge.idempotency_record(42, 999)
    assert attributes(last_span(spans)) == {
        "decision": "run",
        "key": record.key,
        "label": "order 42",
        "token": record.token,
        "attempt": 1,
        "outcome": "completed",
    }
    shop.charge.apply((42, 999))
    assert attributes(last_span(spans))["label"] == "order 42"


@pytest.mark.parametrize("amount", [999, 13], ids=["result", "error"])
def test_a_replay_links_to_the_first_execution(shop: Shop, spans: Spans, amount: int) -> None:
    first = shop.charge.apply((42, amount))
    original = last_span(spans)
    shop.charge.apply((42, amount))

    replay = last_span(spans)
    assert attributes(replay)["decision"] == "replay"
    assert attributes(replay)["first_task_id"] == first.id
    (link,) = replay.links
    assert link.context.span_id == original.context.span_id
    assert link.context.trace_id == original.context.trace_id
    assert replay.context != original.context


def test_a_takeover_has_the_age_of_the_lease(shop: Shop, spans: Spans) -> None:
    shop.begin(shop.charge, 42, 999, lease_ms=0)
    shop.charge.apply((42, 999))

    takeover = attributes(last_span(spans))
    assert (takeover["decision"], takeover["attempt"]) == ("takeover", 2)
    assert 0 <= takeover["orphaned_seconds"] < 60


def test_a_conflict_sets_its_decision(shop: Shop, spans: Spans) -> None:
    shop.begin(shop.charge, 42, 999)
    shop.charge.apply((42, 999))

    assert attributes(last_span(spans))["decision"] == "conflict"


def test_an_outcome_without_tracing_has_no_traceparent(shop: Shop) -> None:
    shop.charge.apply((42, 999))

    assert shop.charge.idempotency_record(42, 999).traceparent == ""
