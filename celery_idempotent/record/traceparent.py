"""Which trace an outcome comes from, so that a replay can be linked to the execution it repeats."""

from __future__ import annotations

from collections.abc import Callable

#: Gives the W3C traceparent of the execution under way, or nothing. Set by whoever traces.
current: Callable[[], str] | None = None


def append_traceparent(form: str) -> str:
    """The format of an outcome, with the trace that it comes from."""
    traceparent = current() if current is not None else ""
    return f"{form} {traceparent}" if traceparent else form
