"""Commands for ``celery inspect`` that return a worker's leases, counters and findings.

The worker's main process replies, while its pool processes run the tasks. It reads leases from the
records, not from those processes, so a frozen process does not prevent a report of its lease.

`ask` is the other side: it sends one of these commands to all workers, for the command line and the
dashboard.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from celery import Celery
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_idempotent.core import worker
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.broker import connection_error, within
from celery_idempotent.core.key import Key
from celery_idempotent.core.lease import MARGIN
from celery_idempotent.core.lease.heartbeat import heartbeat as this_process
from celery_idempotent.core.lease.stack import stack_of
from celery_idempotent.core.printable import one_line
from celery_idempotent.core.record import Record, State
from celery_idempotent.core.record.layout import corrupt
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.task.receive.request import IdempotentRequest
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations import doctor
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.records.reader import RecordReader
from celery_idempotent.redelivery import renewal
from celery_idempotent.waking import waiting_messages

logger = logging.getLogger(__name__)

#: Seconds that a worker waits for Redis, which blocks its main process.
READ_TIMEOUT = 1.0
#: Seconds for the broker to transport request and reply, besides the workers' timeout.
BROKER_TIMEOUT = 1.0


class _ActiveCall(NamedTuple):
    """A message that may hold a lease."""

    request: Any
    key: Key


@inspect_command()
def idempotency_leases(state: Any) -> list[dict[str, Any]] | dict[str, str]:
    """List the leases that the worker holds, with age, heartbeat health, and stack of the body."""
    calls: dict[RecordStore, list[_ActiveCall]] = defaultdict(list)
    for request in tuple(worker_state.active_requests):
        if not isinstance(request, IdempotentRequest):
            continue
        # A call without a key, or whose key cannot be derived, has no lease.
        with contextlib.suppress(IdempotencyError):
            if (key := request.key_and_generation[0]) is not None:
                store = request.task.idempotency_configuration.executor.store
                calls[store].append(_ActiveCall(request, key))
    try:
        return [lease for store, active in calls.items() for lease in _leases(store, active)]
    except IdempotencyError as error:
        return {"error": str(error)}


@inspect_command()
def idempotency_counts(state: Any) -> dict[str, dict[str, int]]:
    """Count executions, replays, conflicts and so on, by task, since the worker started."""
    counters = worker.counters
    if counters is None:
        return {}
    return {task: dict(counter) for task, counter in counters.totals().items()}


@inspect_command()
def idempotency_redelivery(state: Any) -> dict[str, Any]:
    """Count the messages whose redelivery the worker prevents, and show when it last did so."""
    return {} if renewal.current is None else renewal.current.snapshot()


@inspect_command()
def idempotency_waiting(state: Any) -> list[dict[str, Any]]:
    """List the keys for which messages wait in the worker: how many, since when, for which task."""
    return [] if waiting_messages.current is None else waiting_messages.current.snapshot()


@inspect_command()
def idempotency_state(state: Any) -> dict[str, Any]:
    """Reply to all commands above at once."""
    return {
        "leases": idempotency_leases(state),
        "counts": idempotency_counts(state),
        "redelivery": idempotency_redelivery(state),
        "waiting": idempotency_waiting(state),
    }


@inspect_command()
def idempotency_doctor(state: Any) -> list[dict[str, str]]:
    """Run the checks of `doctor` and `health` in the worker, with its clock and its network."""
    leases = idempotency_leases(state)
    leases = leases if isinstance(leases, list) else []
    findings = doctor.check_all(state.app, idempotency_counts(state), leases)
    return [finding.to_json() for finding in findings]


#: Names of the commands, as Celery's command line accepts them.
COMMANDS = tuple(
    command.__name__
    for command in (
        idempotency_leases,
        idempotency_counts,
        idempotency_redelivery,
        idempotency_waiting,
        idempotency_state,
        idempotency_doctor,
    )
)


class Worker(NamedTuple):
    """A worker's reply to `idempotency_state`."""

    leases: list[dict[str, Any]]
    #: What the worker has counted since its start, by task and counter.
    counts: dict[str, dict[str, int]]
    #: What `idempotency_redelivery` returns; empty if the worker renews no messages.
    redelivery: dict[str, Any]
    #: Why its leases are unknown; empty if they are known.
    error: str = ""
    #: What `idempotency_waiting` returns.
    waiting: Sequence[dict[str, Any]] = ()

    @classmethod
    def of(cls, reply: Mapping[str, Any], tasks: Container[str]) -> Worker:
        """Returns a worker from its reply; a failed or unknown command returns an error.

        Args:
            tasks: the names of the tasks whose leases, counters and messages are kept.
        """
        leases = reply.get("leases", reply)
        are_known = isinstance(leases, list)
        return cls(
            [each for each in leases if each["task"] in tasks] if are_known else [],
            {t: each for t, each in reply.get("counts", {}).items() if each and t in tasks},
            reply.get("redelivery", {}),
            "" if are_known else leases.get("error", ""),
            [each for each in reply.get("waiting", ()) if each["task"] in tasks],
        )


class Replies(NamedTuple):
    """Replies of the workers to `idempotency_state`."""

    #: The workers that have replied, by name.
    workers: dict[str, Worker]
    #: Why the command could not be sent; empty if it was.
    failure: str = ""

    @property
    def error(self) -> str:
        """Why there are no replies; empty if there are."""
        return "" if self.workers else self.failure or "No worker replied"

    @property
    def totals(self) -> dict[str, Counter[str]]:
        """The summed counters by task."""
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        for each in self.workers.values():
            for task, counter in each.counts.items():
                totals[task].update(counter)
        return dict(totals)

    @property
    def leases(self) -> list[dict[str, Any]]:
        """The leases of all workers."""
        return [lease for worker in self.workers.values() for lease in worker.leases]

    def waiting(self, key: str) -> dict[str, Any] | None:
        """Returns how many messages wait for `key`, and since when; None if there are none."""
        queues = [w for worker in self.workers.values() for w in worker.waiting if w["key"] == key]
        if not queues:
            return None
        number = sum(each["messages"] for each in queues)
        return {"messages": number, "since": min(each["since"] for each in queues)}

    @property
    def messages_held(self) -> int | None:
        """How many messages the workers hold; None if no worker renews them."""
        redelivery = [worker.redelivery for worker in self.workers.values()]
        numbers = [reply["messages_held"] for reply in redelivery if reply]
        return sum(numbers) if numbers else None


def stack_in(replies: Replies, record: Record) -> list[str]:
    """Returns the stack of the execution that holds a record; empty if it is unknown."""
    for lease in replies.leases:
        if lease["key"] == record.key and lease.get("token") == record.token:
            # A worker of an earlier version sends no stack. A client of the broker may have forged
            # the text, so each line is made safe again.
            return [one_line(str(line)) for line in lease.get("stack", ())]
    return []


def ask(app: Celery, timeout: float, worker: str | None = None) -> Replies:
    """Asks the app's workers for their leases, their counters, and the messages that they hold.

    Workers of other apps on the same broker also reply; they have none of this app's tasks.

    Args:
        timeout: seconds to wait for the workers; 0 asks none.
        worker: the only one to ask; None asks all.
    """

    def run() -> Replies:
        # The connection is checked first, because a broadcast would try to connect for ever.
        if error := connection_error(app, BROKER_TIMEOUT):
            return Replies({}, f"The broker {error}")
        try:
            with app.connection_for_write() as connection:
                mailbox = app.control.mailbox(connection)
                # Without the pool of the app's producers, whose connections may be in use or lost,
                # the mailbox uses `connection`.
                mailbox.producer_pool = None
                call = mailbox.multi_call if worker is None else partial(mailbox.call, [worker])
                replies = call(idempotency_state.__name__, timeout=timeout) or ()
        except Exception as lost:
            return Replies({}, f"The workers cannot be asked: {lost}")
        tasks = {task.name for task in app_tasks.tasks(app)}
        # Only workers of this app: a worker has counters for all tasks of its app.
        return Replies(
            {
                name: Worker.of(reply, tasks)
                for by_worker in replies
                for name, reply in by_worker.items()
                if not (counts := reply.get("counts")) or counts.keys() & tasks
            }
        )

    if not timeout:
        return Replies({}, "No worker was asked")
    silent = Replies({}, "The broker does not reply")
    return within(2 * BROKER_TIMEOUT + timeout, run, silent)


def _leases(store: RecordStore, calls: list[_ActiveCall]) -> Iterator[dict[str, Any]]:
    with RecordReader.open(store, READ_TIMEOUT) as reader:
        views = reader.get({call.key for call in calls})
    for call in calls:
        if view := views.get(call.key):
            if view.record is None:
                raise corrupt(str(call.key))
            if lease := _lease(call, view.record, view.now):
                yield lease


def _lease(call: _ActiveCall, record: Record, now: datetime) -> dict[str, Any]:
    """Returns the fields of a lease; empty for a call without one.

    The record may be that of another execution. Then this call has lost its lease if it has run for
    at least one lease longer than the other; otherwise it is a duplicate that waits or is refused.
    """
    pid, task = call.request.worker_pid, call.request.task
    holds = record.state is State.STARTED and record.task_id == call.request.text_id
    lease = task.idempotency_configuration.settings.lease
    counters = worker.counters
    if counters and pid in counters.frozen_processes() and not record.worker.endswith(f"/{pid}"):
        holds = False  # the message was redelivered
    elif not holds:
        active = time.time() - (call.request.time_start or math.inf)
        other = (now - record.started_at).total_seconds() if record.started_at else 0.0
        if active - other < lease:
            return {}
    fields: dict[str, Any] = {
        "task": task.name,
        "task_id": call.request.id,
        "pid": pid,
        "key": record.key,
        "label": record.label,
    }
    if not holds:
        lost = {"heartbeat": "lost", "held_by": record.task_id, "state": record.state.value}
        return fields | lost
    assert record.deadline is not None
    assert record.started_at is not None
    remaining = (record.deadline - now).total_seconds()
    # A renewal is due after a third of the lease; a failed one is retried soon.
    heartbeat = "healthy" if remaining > lease / 2 else "late" if remaining > 0 else "expired"
    return (
        formatting.record_fields(record, formatting.FACTS)
        | fields
        | {
            "since": record.started_at.isoformat(),
            "held_seconds": round((now - record.started_at).total_seconds(), 3),
            "lease_until": record.deadline.isoformat(),
            "trusted_seconds": round(max(0.0, remaining - MARGIN * lease), 3),
            "extended_seconds_ago": round(lease - remaining, 3),
            "heartbeat": heartbeat,
            "stack": _stack(pid, record),
        }
    )


def _stack(pid: int, record: Record) -> list[str]:
    """Returns where a body is: now or, in a child process, at the last renewal; empty if unknown.

    A process of the pool first notes it at the first renewal, a third of the lease after the begin.
    """
    for lease in this_process.leases():
        if lease.token == record.token and str(lease.key) == record.key:
            return stack_of(lease)
    return worker.counters.stack(pid, record.token) if worker.counters else []
