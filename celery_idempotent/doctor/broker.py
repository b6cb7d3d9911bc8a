"""Checks how soon the broker redelivers a dead worker's messages, compared with the leases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.configuration.broker import (
    AMQP,
    has_predefined_queues,
    options_of,
    quorum_queues,
    transport,
    visibility_timeout,
)
from celery_idempotent.doctor.finding import Check, Finding, Severity, applying

#: Defaults of kombu's Redis transport, which sweeps for unacknowledged messages at an interval
#: (seconds) times a throttle.
RESTORE_INTERVAL, RESTORE_THROTTLE = 10.0, 10
SWEEP_OPTIONS = ("unacked_restore_interval", "unacked_restore_throttle", "unacked_mutex_expire")
#: Default seconds for which a sweeping worker excludes others, even if it dies meanwhile.
MUTEX_EXPIRE = 300.0
#: Sweep interval in seconds above which it may be reported.
LONG_SWEEP = 60.0


def check(app: Celery) -> Iterator[Finding]:
    """Yields all findings about the broker."""
    yield from check_visibility_timeout(app)
    yield from _check_recovery(app)
    enabled = app_tasks.enabled(app)
    for task in enabled:
        yield from _check_retention(app, task)
    yield from applying(
        "broker",
        Check(transport(app) in AMQP and enabled, "publishers", Severity.NOTE,
            "AMQP drops what a publisher without celery_idempotent passes as "
            "send_task(…, idempotency_key=…)",
            "headers={'idempotency_key': …} in each publisher that sends tasks by name",
            "such a call runs under the key of the task's rule, and nothing shows it"),
    )  # fmt: skip
    for queue in quorum_queues(app):
        yield from _check_quorum_queue(queue)


def check_visibility_timeout(app: Celery) -> Iterator[Finding]:
    """Yields a finding if a lease is longer than the visibility timeout."""
    timeout, (lease, task) = visibility_timeout(app), _longest_lease(app)
    if timeout is not None and timeout < lease:
        in_sqs = ", and the same in SQS: kombu does not set it for predefined_queues"
        yield Finding(
            "visibility-timeout", Severity.WARNING, "broker",
            f"its visibility timeout ({timeout:g} s) is shorter than the lease of {task} "
            f"({lease:g} s)",
            f"broker_transport_options['visibility_timeout'] above {lease:g}"
            + (in_sqs if has_predefined_queues(app) else ""),
            "messages of running tasks are redelivered again and again, each time as a conflict; "
            "so are messages with an eta or countdown beyond the timeout",
        )  # fmt: skip


def _check_recovery(app: Celery) -> Iterator[Finding]:
    timeout, (lease, _) = visibility_timeout(app), _longest_lease(app)
    if timeout is None or not lease:
        return
    sweep, options, without_sweep = _sweep_interval(app), "", ""
    slowest = max(timeout + sweep, lease)
    if sweep:
        mutex_expire = float(options_of(app).get("unacked_mutex_expire", MUTEX_EXPIRE))
        options = f", {', '.join(SWEEP_OPTIONS)}"
        without_sweep = f"; if a worker dies during a sweep, there is none for {mutex_expire:g} s"
    yield from applying(
        "broker",
        Check(True, "recovery", Severity.NOTE,
            f"after a whole worker dies, its tasks run again within {slowest:g} s: "
            f"visibility timeout {timeout:g} s, sweep {sweep:g} s, longest lease {lease:g} s",
            "broker_transport_options: visibility_timeout, above the longest task and countdown"
            + options,
            "the broker, not the lease, determines when a dead worker's messages are redelivered"
            + without_sweep),
        Check(sweep > LONG_SWEEP and timeout < sweep, "sweep", Severity.WARNING,
            f"it sweeps for messages to redeliver only every {sweep:g} s",
            "broker_transport_options['unacked_restore_throttle'] = 1",
            f"messages are redelivered later than the visibility timeout of {timeout:g} s "
            "suggests"),
    )  # fmt: skip


def _check_retention(app: Celery, task: IdempotentTaskLike) -> Iterator[Finding]:
    """Yields a finding if an outcome expires before a duplicate of its call may come back."""
    settings = task.idempotency_configuration.settings
    option, retention = "idempotency_result_ttl", settings.result_ttl
    if settings.replay_errors and settings.error_ttl < retention:
        option, retention = "idempotency_error_ttl", settings.error_ttl
    timeout = visibility_timeout(app)
    slowest = timeout + _sweep_interval(app) if timeout else 0.0
    return applying(
        task.name,
        Check(retention < slowest, "result-ttl", Severity.WARNING,
            f"{option} ({retention:g} s) is shorter than the broker's redelivery (up to "
            f"{slowest:g} s)",
            f"{option} above {slowest:g}",
            "a dead worker's message that comes back after the outcome has expired runs again"),
    )  # fmt: skip


def _check_quorum_queue(queue: Any) -> Iterator[Finding]:
    limit = (queue.queue_arguments or {}).get("x-delivery-limit")
    return applying(
        f"queue {queue.name}",
        Check(limit is None, "delivery-limit", Severity.NOTE,
            "RabbitMQ 4 drops a message of a quorum queue after it was requeued 20 times",
            "a policy with delivery-limit -1, or with a dead-letter-exchange, or x-delivery-limit",
            "a message that cannot be published again is requeued: 20 times take 80 minutes, less "
            "if the task has a hard time limit"),
        Check(queue.exchange.type == "direct", "delayed-delivery", Severity.WARNING,
            "Celery cannot delay messages of a quorum queue whose exchange is direct",
            "task_default_exchange_type = 'topic', or exchange_type in task_queues (Celery 5.5)",
            "duplicates that are retried later wait in the worker, where they take the place of "
            "other messages: a worker cannot raise its prefetch count on a quorum queue"),
    )  # fmt: skip


def _sweep_interval(app: Celery) -> float:
    if transport(app) == "sqs":
        return 0.0
    options = options_of(app)
    interval = options.get("unacked_restore_interval", RESTORE_INTERVAL)
    return float(interval) * (options.get("unacked_restore_throttle", RESTORE_THROTTLE) or 1)


def _longest_lease(app: Celery) -> tuple[float, str]:
    """Returns the longest lease and its task; 0 without a task."""
    leases = [(t.idempotency_configuration.settings.lease, t.name) for t in app_tasks.enabled(app)]
    return max(leases, default=(0.0, ""))
