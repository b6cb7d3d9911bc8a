"""How soon the broker hands a dead worker's messages out again, against the leases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.broker import (
    has_predefined_queues,
    options_of,
    quorum_queues,
    transport,
    visibility_timeout,
)
from celery_idempotent.doctor.finding import Finding, Severity

#: kombu's Redis transport looks for such messages every so many seconds, times the throttle.
RESTORE_INTERVAL, RESTORE_THROTTLE = 10.0, 10
SWEEP_OPTIONS = ("unacked_restore_interval", "unacked_restore_throttle", "unacked_mutex_expire")
#: One worker at a time does, and says so for this long (seconds), even if it dies meanwhile.
MUTEX_EXPIRE = 300.0
#: Seconds after which a sweep is worth a word.
LONG_SWEEP = 60.0
PREDEFINED = ", and the same in SQS: kombu does not set it for predefined_queues"


def check(app: Celery) -> Iterator[Finding]:
    """All findings about the broker."""
    yield from visibility(app)
    yield from _recovery(app)
    for queue in quorum_queues(app):
        yield from _quorum_queue(queue)


def visibility(app: Celery) -> Iterator[Finding]:
    """A lease that outlasts the visibility timeout."""
    timeout, longest = visibility_timeout(app), _longest_lease(app)
    if timeout is None or longest is None or timeout >= longest[0]:
        return
    lease, task = longest
    yield Finding(
        "visibility-timeout",
        Severity.WARNING,
        "broker",
        f"its visibility timeout ({timeout:g} s) is shorter than the lease of {task} ({lease:g} s)",
        f"broker_transport_options['visibility_timeout'] above {lease:g}"
        + (PREDEFINED if has_predefined_queues(app) else ""),
        "messages of healthy workers are handed out again and again, and come back as conflicts; "
        "an eta or countdown beyond it does the same",
    )


def _recovery(app: Celery) -> Iterator[Finding]:
    timeout, longest = visibility_timeout(app), _longest_lease(app)
    if timeout is None or longest is None:
        return
    sweep = _sweep(app)
    slowest = max(timeout + sweep, longest[0])
    yield Finding(
        "recovery",
        Severity.NOTE,
        "broker",
        f"after the death of a whole worker its tasks run again within {slowest:g} s: "
        f"visibility timeout {timeout:g} s, sweep {sweep:g} s, longest lease {longest[0]:g} s",
        "broker_transport_options: visibility_timeout, above the longest task and countdown"
        + (f", {', '.join(SWEEP_OPTIONS)}" if sweep else ""),
        "the broker, not the lease, decides when a dead worker's messages are handed out again"
        + (f"; if it dies amid such a sweep, there is none for {_mutex(app):g} s" if sweep else ""),
    )
    if sweep > LONG_SWEEP and timeout < sweep:
        yield Finding(
            "sweep",
            Severity.WARNING,
            "broker",
            f"it looks for messages to hand out again only every {sweep:g} s",
            "broker_transport_options['unacked_restore_throttle'] = 1",
            f"a visibility timeout of {timeout:g} s promises less",
        )


def _quorum_queue(queue: Any) -> Iterator[Finding]:
    subject = f"queue {queue.name}"
    if _argument(queue, "x-delivery-limit") is None:
        yield Finding(
            "delivery-limit",
            Severity.NOTE,
            subject,
            "RabbitMQ 4 drops a message of a quorum queue after 20 returns to the queue",
            "a policy with delivery-limit -1, or with a dead-letter-exchange, or x-delivery-limit",
            "a message that cannot be published again is returned: 20 times take 80 minutes, less "
            "where tasks have a hard time limit",
        )
    if queue.exchange.type == "direct":
        yield Finding(
            "delayed-delivery",
            Severity.WARNING,
            subject,
            "Celery delays no message of a quorum queue whose exchange is direct",
            "task_default_exchange_type = 'topic', or exchange_type in task_queues (Celery 5.5)",
            "duplicates that come back wait in workers, and those that wait take the place of "
            "others: a worker's prefetch count cannot grow with a quorum queue",
        )


def _argument(queue: Any, name: str) -> Any:
    return (queue.queue_arguments or {}).get(name)


def _sweep(app: Celery) -> float:
    if transport(app) == "sqs":
        return 0.0
    options = options_of(app)
    interval = options.get("unacked_restore_interval", RESTORE_INTERVAL)
    return float(interval) * (options.get("unacked_restore_throttle", RESTORE_THROTTLE) or 1)


def _mutex(app: Celery) -> float:
    return float(options_of(app).get("unacked_mutex_expire", MUTEX_EXPIRE))


def _longest_lease(app: Celery) -> tuple[float, str] | None:
    leases = [(t.idempotency_configuration.settings.lease, t.name) for t in app_tasks.enabled(app)]
    return max(leases, default=None)
