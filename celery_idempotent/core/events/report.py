"""Reports an event: writes its log line, counts it and sends its signal.

Each line is ``key (label): task id (attempt n) …``. Its record has attributes for structured logs,
which a JSON formatter includes. Their prefix distinguishes them from attributes that the
application's `LogRecord` factory may set: `logging` raises an error if a name is in use.

Task ids, labels and error texts are untrusted: they cannot end a line or control a terminal.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeVar

from celery_idempotent.core.clock import monotonic
from celery_idempotent.core.events import table
from celery_idempotent.core.events.table import Event, reason_of
from celery_idempotent.core.printable import one_line
from celery_idempotent.errors import IdempotencyError

logger = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=Exception)

#: Functions that receive each counted name, one of `COUNTED`, and the name of the task or function.
counters: list[Callable[[str, str], None]] = []


class CallInFlow(Protocol):
    """What `report` needs of the call in the flow (`core.flow.call.Call`)."""

    #: The sender of its signals: the task or function.
    sender: Any
    #: A `Key`; empty if none can be derived.
    key: Any
    task_id: str
    #: The decision about this delivery, one of `DECISIONS`; empty until :func:`report` sets it.
    decision: str

    @property
    def label(self) -> str:
        """Shown beside the key; may be empty."""


class CallIdentity(NamedTuple):
    """Identifies a call that is not in the flow, for `report`.

    It is being published, or is handled by the worker's main process or by an operator, or has no
    key because none can be derived.
    """

    sender: Any
    task: str
    task_id: str
    key: Any = ""
    label: str = ""
    decision: str = ""


Reported = CallInFlow | CallIdentity


def report(event: Event, call: Reported, execution: Any = None, **fields: Any) -> None:
    """Reports that `event` has happened to `call`.

    Args:
        execution: the call's execution, if it has begun one.
        fields: values for the message, the counter's name and the signal.
    """
    names = []
    if event.decision and not call.decision:
        if not isinstance(call, CallIdentity):
            call.decision = event.decision
        names.append(event.decision)
    if event.counter:
        names.append(event.counter.format_map(fields))
    if names:
        task = call.task if isinstance(call, CallIdentity) else call.key.task
        for name, counter in product(names, counters):
            counter(name, task)
    if event.level and (event.logger or logger).isEnabledFor(event.level):
        _log(event, call, execution, fields)
    if (signal := event.signal) is not None and signal.receivers:
        if execution is not None:
            fields |= {"token": execution.token, "attempt": execution.attempt}
        fields |= {"task_id": call.task_id, "key": str(call.key), "label": call.label}
        fields.setdefault("decision", event.decision)
        details = {name: fields.get(name) for name in signal.providing_args}
        signal.send(sender=call.sender, **details)


def _log(event: Event, call: Reported, execution: Any, fields: dict[str, Any]) -> None:
    token, attempt = (execution.token, execution.attempt) if execution is not None else (0, 0)
    (event.logger or logger).log(
        event.level,
        "%s%s:%s%s " + event.template,
        one_line(call.key or getattr(call, "task", "")),
        one_line(f" ({call.label})") if call.label else "",
        one_line(f" task {call.task_id}") if call.task_id else "",
        f" (attempt {attempt})" if attempt else "",
        *(_shown(call.key, value) for value in event.values(fields)),
        extra=log_extra(
            call.key,
            task_id=call.task_id,
            label=call.label,
            decision=call.decision or event.decision,
            token=token,
            attempt=attempt,
        ),
        stacklevel=3,
    )


def log_extra(
    key: str | None,
    *,
    task_id: str | None = None,
    label: str | None = None,
    decision: str | None = None,
    token: int | None = None,
    attempt: int | None = None,
) -> dict[str, Any]:
    """Returns the attributes of a log record about a call, for ``extra``; None where unknown.

    Args:
        decision: one of `DECISIONS`.
    """
    return {
        "idempotency_key": one_line(key) if key else None,
        "idempotency_task_id": one_line(task_id) if task_id else None,
        "idempotency_label": one_line(label) if label else None,
        "idempotency_decision": decision or None,
        "idempotency_token": token or None,
        "idempotency_attempt": attempt or None,
    }


def _shown(key: str, value: Any) -> Any:
    """Returns `value` on one line; in the text of an error, "the key" replaces `key`.

    Each line already begins with the key.
    """
    if isinstance(value, BaseException):
        text = str(value) if isinstance(value, IdempotencyError) else repr(value)
        value = text.replace(key, "the key") if key else text
    return one_line(value) if isinstance(value, str) else value


def report_refused(
    call: Reported, error: ErrorT, event: Event = table.REFUSED, at: str = "begin"
) -> ErrorT:
    """Reports that `call` is refused, and returns `error` for the caller to raise.

    Args:
        at: where it is refused: "begin", or "publish" for a call that is not published.
    """
    report(event, call, error=error, reason=reason_of(error), at=at)
    return error


def decide_by(call: CallInFlow, error: BaseException) -> None:
    """Reports the decision about a call that `error` has ended, unless one was already made."""
    if not call.decision:
        if isinstance(error, IdempotencyError):
            report_refused(call, error)
        else:
            report(table.INTERRUPTED, call)


#: Minimum seconds between two log lines about one cause.
INTERVAL = 60.0


class Repeats:
    """Limits the log lines about one cause to one a minute, and counts those left out.

    Threads may miscount by one or two.
    """

    def __init__(self) -> None:
        #: For each cause: when its last line was written (seconds of `monotonic`), and how many
        #: lines were left out since.
        self._logged: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, cause: Hashable) -> int | None:
        """Counts a line about `cause`.

        Returns the number of lines left out since the last one that was written; None if this one
        is to be left out too.
        """
        now = monotonic()
        logged_at, number = self._logged.get(cause, (-INTERVAL, 0))
        if now - logged_at < INTERVAL:
            self._logged[cause] = logged_at, number + 1
            return None
        self._logged[cause] = now, 0
        return number


def like_it(number: int) -> str:
    """Returns the end of a line that represents `number` others; empty for 0."""
    return f" (and {number:,} like it)" if number else ""


def log_apart(logger: logging.Logger, level: int, message: str, *args: Any, **options: Any) -> None:
    """Logs as ``logger.log`` does, but in a thread of its own; the heartbeat uses it.

    A body may be stuck in a log handler, such as one that writes to a full pipe, and then holds the
    handler's lock. If the heartbeat waited for that lock, the leases would expire.
    """
    threading.Thread(
        target=logger.log,
        args=(level, message, *args),
        kwargs=options,
        name="idempotency-log",
        daemon=True,
    ).start()
