"""The traceparent of an outcome, which links a replay to the execution that it repeats."""

from __future__ import annotations

from collections.abc import Callable

#: Returns the W3C traceparent of the current span, or "". Set by contrib.opentelemetry.
current: Callable[[], str] | None = None


def append_traceparent(form: str) -> str:
    """Returns the format of an outcome with the current traceparent after it."""
    traceparent = current() if current is not None else ""
    return f"{form} {traceparent}" if traceparent else form
