"""``celery inspect``: what a worker answers about its idempotent tasks.

The pool's processes do the work, the main process answers. What a process holds is told by the
records themselves, which its heartbeat writes: so the answer is what holds, not what the process
believes, and it comes even where that process is frozen.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from typing import Any

from celery import Celery
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.lease.held import MARGIN
from celery_idempotent.ops import doctor, tally
from celery_idempotent.ops.records import Sight
from celery_idempotent.record.record import State
from celery_idempotent.store.records import RecordStore

logger = logging.getLogger(__name__)

#: Seconds that a worker waits for Redis before it answers without it: it does nothing else then.
PATIENCE = 1.0


@inspect_command()
def idempotency_leases(state: Any) -> list[dict[str, Any]] | dict[str, str]:
    """Leases that each process holds: since when, trusted how long, and the heartbeat's health."""
    asked: dict[RecordStore, dict[Key, Any]] = defaultdict(dict)
    for request in tuple(worker_state.active_requests):
        key = _key_of(request)
        if key is not None:
            asked[request.task.idempotency_configuration.gate.store][key] = request
    try:
        return [
            _lease(sight, requests[sight.key])
            for store, requests in asked.items()
            for sight in _look(store, requests)
        ]
    except IdempotencyError as error:
        return {"error": str(error)}


@inspect_command()
def idempotency_counts(state: Any) -> dict[str, dict[str, int]]:
    """How often each task begun, replayed, met a conflict …, since the worker was started."""
    board = tally.tally
    return {} if board is None else {task: dict(one) for task, one in board.sums().items()}


@inspect_command()
def idempotency_doctor(state: Any) -> list[dict[str, str]]:
    """What `idempotency doctor` finds as seen from the worker: its clock, its way to Redis."""
    return [
        {
            "name": one.name,
            "severity": str(one.severity),
            "subject": one.subject,
            "what": one.what,
            "setting": one.setting,
            "why": one.why,
        }
        for one in doctor.examine(state.app)
    ]


#: By name, as Celery's command line takes them.
COMMANDS = tuple(
    command.__name__ for command in (idempotency_leases, idempotency_counts, idempotency_doctor)
)


def counts(app: Celery, timeout: float) -> dict[str, Counter[str]] | None:
    """The counts of all workers, by task; None if none has answered within `timeout` seconds."""
    try:
        replies = app.control.broadcast("idempotency_counts", reply=True, timeout=timeout)
    except Exception as error:
        logger.debug("The workers could not be asked: %s", error)
        return None
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for reply in replies or ():
        for answer in reply.values():
            for task, one in answer.items() if "error" not in answer else ():
                found[task].update(one)
    return dict(found) if replies else None


def _key_of(request: Any) -> Key | None:
    try:
        key: Key | None = request.idempotency_key()
    except Exception:  # not one of ours, or its arguments give no key: then it holds none
        return None
    return key


def _look(store: RecordStore, requests: dict[Key, Any]) -> list[Sight]:
    with store.watch(PATIENCE) as watch:
        return [
            Sight(key, watch.read(found), found.now, store)
            for key, found in watch.look_up(requests).items()
        ]


def _lease(sight: Sight, request: Any) -> dict[str, Any]:
    record, now = sight.record, sight.now
    assert record is not None
    told: dict[str, Any] = {
        "task": request.task.name,
        "task_id": request.id,
        "pid": request.worker_pid,
        "key": record.key,
    }
    if record.state is not State.STARTED or record.task_id != request.id:
        return told | {"heartbeat": "lost", "held_by": record.task_id, "state": record.state.value}
    assert record.deadline is not None
    assert record.started_at is not None
    lease = request.task.idempotency_configuration.settings.lease
    left = (record.deadline - now).total_seconds()
    return told | {
        "worker": record.worker,
        "token": record.token,
        "attempt": record.attempt,
        "since": record.started_at.isoformat(),
        "held_seconds": round((now - record.started_at).total_seconds(), 3),
        "lease_until": record.deadline.isoformat(),
        "trusted_seconds": round(max(0.0, left - MARGIN * lease), 3),
        "extended_seconds_ago": round(lease - left, 3),
        "heartbeat": _health(lease, left),
    }


def _health(lease: float, left: float) -> str:
    """A beat is due when a third of the lease is over; one that fails is tried again soon."""
    if left <= 0:
        return "over"
    return "healthy" if lease - left < lease / 2 else "late"
