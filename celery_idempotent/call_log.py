"""The log lines about calls: how they begin, and their fields for structured logs.

Each line is ``key (label): task id (attempt n) …``. Its record has the attributes that
:func:`fields` returns, which a formatter for JSON includes. Their prefix keeps them apart from the
attributes that a `LogRecord` factory of the application may set: `logging` raises an error for a
name that is in use.

Task ids, labels and texts of errors are of foreign origin: none ends its line, or acts upon the
terminal that shows it.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.printable import one_line


def fields(
    key: str | None,
    *,
    task_id: str | None = None,
    label: str | None = None,
    decision: str | None = None,
    token: int | None = None,
    attempt: int | None = None,
) -> dict[str, Any]:
    """Returns the attributes of a record about a call, for ``extra``; None: there is none.

    Args:
        decision: one of `signals.DECISIONS`.
    """
    return {
        "idempotency_key": one_line(key) if key else None,
        "idempotency_task_id": one_line(task_id) if task_id else None,
        "idempotency_label": one_line(label) if label else None,
        "idempotency_decision": decision or None,
        "idempotency_token": token or None,
        "idempotency_attempt": attempt or None,
    }


def log_call(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: Any,
    key: str,
    task_id: str,
    task: str = "",
    label: str = "",
    decision: str = "",
    token: int = 0,
    attempt: int = 0,
    exc_info: bool = False,
) -> None:
    """Logs that the task … `message`.

    Args:
        message: continues the sentence; `args` are merged into it.
        key: empty if none can be derived.
        task: its name, which stands for the key then.
        attempt: 0 if no execution has begun.
    """
    if not logger.isEnabledFor(level):
        return
    logger.log(
        level,
        f"%s%s: task %s%s {message}",  # noqa: G004 - message is a template, too
        one_line(key or task),
        one_line(f" ({label})") if label else "",
        one_line(task_id),
        f" (attempt {attempt})" if attempt else "",
        *map(_shown, args),
        extra=fields(
            key, task_id=task_id, label=label, decision=decision, token=token, attempt=attempt
        ),
        exc_info=exc_info,
        stacklevel=3,
    )


def _shown(argument: Any) -> Any:
    if isinstance(argument, IdempotencyError):
        argument = str(argument)
    return one_line(argument) if isinstance(argument, str) else argument
