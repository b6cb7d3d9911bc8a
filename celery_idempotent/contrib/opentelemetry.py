"""OpenTelemetry instrumentation: adds decisions to the spans of Celery's instrumentation.

``opentelemetry-instrument celery -A shop worker`` loads the instrumentor from its entry point;
otherwise call ``IdempotencyInstrumentor().instrument()`` next to Celery's own. Outcomes are stored
with their trace context, and the span of a replay links to the span of the first execution.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined]
    BaseInstrumentor,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from celery_idempotent import signals
from celery_idempotent.core.record import Record
from celery_idempotent.core.store import commands

_PROPAGATOR = TraceContextTextMapPropagator()


class IdempotencyInstrumentor(BaseInstrumentor):  # type: ignore[misc,unused-ignore]
    """Sets attributes ``idempotency.*`` on the current span, and links replays to originals."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Returns the packages that must be installed."""
        return ("celery >= 5.3",)

    def _instrument(self, **_: Any) -> None:
        commands.current_traceparent = _traceparent
        for signal, handler in _HANDLERS:
            signal.connect(handler, weak=False)

    def _uninstrument(self, **_: Any) -> None:
        commands.current_traceparent = None
        for signal, handler in _HANDLERS:
            signal.disconnect(handler)


def _traceparent() -> str:
    """Returns the context of the current span as a W3C traceparent; empty without a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


def _set_attributes(*, label: str = "", **attributes: Any) -> None:
    if label:
        attributes["label"] = label
    span = trace.get_current_span()
    for name, value in attributes.items():
        span.set_attribute(f"idempotency.{name}", value)


def _begun(key: str, label: str, token: int, attempt: int, **_: Any) -> None:
    decision = "takeover" if attempt > 1 else "run"
    _set_attributes(decision=decision, key=key, label=label, token=token, attempt=attempt)


def _taken_over(orphaned_seconds: float, **_: Any) -> None:
    _set_attributes(orphaned_seconds=orphaned_seconds)


def _replayed(key: str, label: str, record: Record, **_: Any) -> None:
    _set_attributes(decision="replay", key=key, label=label, first_task_id=record.task_id)
    first = _PROPAGATOR.extract({"traceparent": record.traceparent})
    context = trace.get_current_span(first).get_span_context()
    if context.is_valid:
        trace.get_current_span().add_link(context, {"idempotency.link": "first execution"})


def _conflicted(key: str, label: str, record: Record, policy: str, **_: Any) -> None:
    _set_attributes(
        decision="conflict", key=key, label=label, holder_task_id=record.task_id, policy=policy
    )


def _store_unavailable(key: str, label: str, policy: str, **_: Any) -> None:
    _set_attributes(decision="store_unavailable", key=key, label=label, policy=policy)


def _refused(key: str, label: str, reason: str, at: str, **_: Any) -> None:
    if at == "begin":
        _set_attributes(decision="refused", key=key, label=label, reason=reason)


def _ended(signal: Any, **_: Any) -> None:
    _set_attributes(outcome=signal.name.removeprefix(signals.PREFIX))


_HANDLERS = (
    (signals.begun, _begun),
    (signals.taken_over, _taken_over),
    (signals.replayed, _replayed),
    (signals.conflicted, _conflicted),
    (signals.store_unavailable, _store_unavailable),
    (signals.refused, _refused),
    *((getattr(signals, outcome), _ended) for outcome in signals.OUTCOMES),
)
