"""Checks how soon the broker redelivers a dead worker's messages, compared with the leases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import Celery

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration import broker as configured
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.flow.conflict import LONGEST_DELAY
from celery_idempotent.core.task.message.message_headers import EXPLICIT_KEY_HEADER
from celery_idempotent.operations.doctor.finding import Check, Finding, Severity, applying
from celery_idempotent.redelivery.renewal import RESTORE_INTERVAL

#: Defaults of kombu's Redis transport, which sweeps for unacknowledged messages at an interval
#: (seconds) times a throttle.
SWEEP_INTERVAL, SWEEP_THROTTLE = 10.0, 10
SWEEP_OPTIONS = ("unacked_restore_interval", "unacked_restore_throttle", "unacked_mutex_expire")
#: Default lifetime in seconds of the lock under which a worker sweeps: if it dies, no worker sweeps
#: for so long.
MUTEX_EXPIRE = 300.0
#: Seconds after which RabbitMQ, by default, closes the channel of a message that is not
#: acknowledged.
CONSUMER_TIMEOUT = 1800.0
#: Sweep interval, in seconds, above which it may be reported.
LONG_SWEEP = 60.0
#: Seconds for connecting to the broker.
CONNECT_TIMEOUT = 2.0


def check(app: Celery) -> Iterator[Finding]:
    """Yields all findings about the broker's settings."""
    yield from check_visibility_timeout(app)
    yield from check_redelivery(app)
    enabled = app_tasks.enabled(app)
    is_amqp = configured.transport(app) in configured.AMQP and bool(enabled)
    is_redis = bool(_sweep_interval(app) and configured.visibility_timeout(app) and enabled)
    options = configured.options_of(app)
    longest = max((getattr(task, "time_limit", None) or 0.0 for task in enabled), default=0.0)
    lease, _ = _longest_lease(app)
    timeout, renewed = configured.visibility_timeout(app) or 0.0, configured.redeliver_after(app)
    by_worker = bool(timeout and lease) and renewed is not None
    by_broker = bool(timeout and lease) and renewed is None
    sweep, redelivery = _sweep_interval(app), _redelivery(app)
    mutex_expire = float(options.get("unacked_mutex_expire", MUTEX_EXPIRE))
    within = f"after a whole worker dies, its tasks run again within {max(redelivery, lease):g} s"
    yield from applying(
        "broker",
        Check(by_worker, "recovery", Severity.NOTE,
            f"{within}: idempotency_redeliver_after {renewed or 0:g} s, sweep "
            f"{RESTORE_INTERVAL:g} s, longest lease {lease:g} s",
            "idempotency_redeliver_after, and idempotency_lease: above the longest pause of a "
            "process",
            "a live worker renews messages and leases; messages of unprotected tasks, and of map, "
            f"starmap and chunks, wait for the visibility timeout of {timeout:g} s"),
        Check(by_broker, "recovery", Severity.NOTE,
            f"{within}: visibility timeout {timeout:g} s, sweep {sweep:g} s, longest lease "
            f"{lease:g} s",
            "broker_transport_options: visibility_timeout, above the longest task and countdown"
            + (f", {', '.join(SWEEP_OPTIONS)}" if sweep else ""),
            "the broker, not the lease, determines when a dead worker's messages are redelivered"
            + (f"; if a worker dies during a sweep, there is none for {mutex_expire:g} s"
               if sweep else "")),
        Check(by_broker and sweep > LONG_SWEEP and timeout < sweep, "sweep", Severity.WARNING,
            f"it sweeps for messages to redeliver only every {sweep:g} s",
            "broker_transport_options['unacked_restore_throttle'] = 1",
            f"messages are redelivered later than the visibility timeout of {timeout:g} s "
            "suggests"),
        Check(is_redis and not options.get("socket_timeout"), "socket-timeout", Severity.NOTE,
            "a worker waits for the broker's replies without a limit",
            "broker_transport_options['socket_timeout'] = 10",
            "if its connection is cut at the wrong moment, it takes no more messages, and logs "
            "nothing"),
        Check(is_amqp and not app.conf.broker_heartbeat, "heartbeat", Severity.WARNING,
            "broker_heartbeat is off",
            "broker_heartbeat = 120, Celery's default",
            "RabbitMQ does not notice that a host is lost, and keeps the messages of its workers"),
        Check(is_amqp and longest > CONSUMER_TIMEOUT, "consumer-timeout", Severity.NOTE,
            f"a task may run for {longest:g} s",
            "consumer_timeout in rabbitmq.conf, or x-consumer-timeout of the queue, above it",
            f"RabbitMQ redelivers a message that is not acknowledged within {CONSUMER_TIMEOUT:g} s "
            "by default"),
        Check(is_amqp, "publishers", Severity.NOTE,
            "AMQP drops what a publisher without celery_idempotent passes as "
            f"send_task(…, {EXPLICIT_KEY_HEADER}=…)",
            f"headers={{'{EXPLICIT_KEY_HEADER}': …}} in each publisher that sends tasks by name",
            "such a call runs under the key of the task's rule, and nothing shows it"),
    )  # fmt: skip
    for task in enabled:
        yield from _check_retention(task, redelivery)
    attempts = max(
        (task.idempotency_configuration.settings.max_attempts for task in enabled), default=0
    )
    for queue in configured.quorum_queues(app):
        yield from _check_quorum_queue(queue, attempts)


def check_connection(app: Celery) -> Iterator[Finding]:
    """Yields a finding if the broker does not reply."""
    if error := configured.connection_error(app, CONNECT_TIMEOUT):
        yield Finding(
            "broker-unreachable", Severity.ERROR, "broker",
            error, "start the broker, or correct broker_url",
            "nothing can be published, workers take no messages, and doctor cannot inspect them",
        )  # fmt: skip


def check_visibility_timeout(app: Celery) -> Iterator[Finding]:
    """Yields a finding if a lease exceeds a visibility timeout that no worker renews."""
    timeout, (lease, task) = configured.visibility_timeout(app), _longest_lease(app)
    if timeout is not None and timeout < lease and configured.redeliver_after(app) is None:
        in_sqs = ", and the same in SQS: kombu does not set it for predefined_queues"
        yield Finding(
            "visibility-timeout", Severity.WARNING, "broker",
            f"its visibility timeout ({timeout:g} s) is shorter than the lease of {task} "
            f"({lease:g} s)",
            f"broker_transport_options['visibility_timeout'] above {lease:g}"
            + (in_sqs if configured.has_predefined_queues(app) else ""),
            "messages of running tasks are redelivered again and again, each time as a conflict; "
            "so are messages with an eta or countdown beyond the timeout",
        )  # fmt: skip


def check_redelivery(app: Celery) -> Iterator[Finding]:
    """Yields findings for messages that are never redelivered, and for an option without effect."""
    if not app_tasks.enabled(app):
        return
    is_set = app.conf.get("idempotency_redeliver_after") is not None
    if is_set and configured.visibility_timeout(app) is None:
        yield Finding(
            "recovery", Severity.WARNING, "broker",
            "idempotency_redeliver_after has no effect on this broker",
            "none is needed; remove the option",
            f"redelivery of a dead worker's messages: {configured.describe_redelivery(app)}",
        )  # fmt: skip
    setting = "no_ack=False in its Queue"
    if not configured.acknowledges(app):
        setting = "broker_transport_options['ack_emulation'] = True"
    for name in configured.unacknowledged_queues(app):
        yield Finding(
            "no-ack", Severity.WARNING, f"queue {name}",
            "its messages are not acknowledged", setting,
            "what a killed worker has received is lost, and so is a duplicate that cannot be "
            "published again",
        )  # fmt: skip


def _check_retention(task: IdempotentTaskLike, redelivery: float) -> Iterator[Finding]:
    """Yields a finding if an outcome may expire before its call is redelivered."""
    settings = task.idempotency_configuration.settings
    option, retention = "idempotency_result_ttl", settings.result_ttl
    if settings.replay_errors and settings.error_ttl < retention:
        option, retention = "idempotency_error_ttl", settings.error_ttl
    if retention < redelivery:
        yield Finding(
            "result-ttl", Severity.WARNING, task.name,
            f"{option} ({retention:g} s) is shorter than the broker's redelivery (up to "
            f"{redelivery:g} s)",
            f"{option} above {redelivery:g}",
            "a dead worker's message that comes back after the outcome has expired runs again",
        )  # fmt: skip


def _check_quorum_queue(queue: Any, attempts: int) -> Iterator[Finding]:
    limit = (queue.queue_arguments or {}).get("x-delivery-limit")
    return applying(
        f"queue {queue.name}",
        Check(limit is None, "delivery-limit", Severity.NOTE,
            "RabbitMQ 4 drops a message of a quorum queue after it was requeued 20 times",
            "a policy with delivery-limit -1, or with a dead-letter-exchange, or x-delivery-limit",
            "a message that cannot be published again is requeued: 20 times take 80 minutes, less "
            "if the task has a hard time limit"),
        Check(limit is not None and 0 <= limit < attempts, "delivery-limit", Severity.WARNING,
            f"x-delivery-limit ({limit}) is below idempotency_max_attempts ({attempts})",
            "a higher x-delivery-limit",
            "RabbitMQ drops a message that kills its process before its call is FAILED, and its "
            "callers wait"),
        Check(queue.exchange.type == "direct", "delayed-delivery", Severity.WARNING,
            "Celery cannot delay messages of a quorum queue whose exchange is direct",
            "task_default_exchange_type = 'topic', or exchange_type in task_queues (Celery 5.5)",
            "duplicates that are retried later wait in the worker, where they take the place of "
            "other messages: a worker cannot raise its prefetch count on a quorum queue"),
        Check(queue.exchange.type != "direct", "delayed-delivery", Severity.NOTE,
            "RabbitMQ delays the messages of a quorum queue",
            "a classic queue for tasks whose duplicates have to go on at once",
            f"a duplicate of a running call comes back after 1 to {LONGEST_DELAY:g} s; it "
            "is not woken when the call ends"),
    )  # fmt: skip


def _redelivery(app: Celery) -> float:
    """Returns the seconds until a dead worker's messages are redelivered; 0 if at once."""
    timeout, seconds = configured.visibility_timeout(app), configured.redeliver_after(app)
    if seconds is not None:
        return seconds + RESTORE_INTERVAL
    return timeout + _sweep_interval(app) if timeout else 0.0


def _sweep_interval(app: Celery) -> float:
    if configured.transport(app) == "sqs":
        return 0.0
    options = configured.options_of(app)
    interval = options.get("unacked_restore_interval", SWEEP_INTERVAL)
    return float(interval) * (options.get("unacked_restore_throttle", SWEEP_THROTTLE) or 1)


def _longest_lease(app: Celery) -> tuple[float, str]:
    """Returns the longest lease and its task; 0 without a task."""
    leases = [(t.idempotency_configuration.settings.lease, t.name) for t in app_tasks.enabled(app)]
    return max(leases, default=(0.0, ""))
