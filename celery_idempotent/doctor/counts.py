"""Checks what the workers have counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.events.table import REFUSED_FOR, WOULD_REFUSE_FOR

_KEY_RULE = "key_rule"


def check(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Yields all findings about the calls since the workers were started.

    Args:
        counts: by task and by name, one of `events.table.COUNTED`.
    """
    for task, counter in counts.items():
        for prefix, severity, why in (
            (REFUSED_FOR, Severity.ERROR, "these calls have failed, and did not run"),
            (WOULD_REFUSE_FOR, Severity.WARNING, "without shadow, these calls will fail"),
        ):
            if number := counter.get(prefix + _KEY_RULE, 0):
                yield Finding(
                    "rule-raised", severity, task,
                    f"no key could be derived for {number} of its calls since the workers started",
                    "idempotency_key, or the publisher of these calls; the log has each "
                    "KeyRuleError with its cause",
                    why,
                )  # fmt: skip
