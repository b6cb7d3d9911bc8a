"""``celery inspect``: what a worker answers about its idempotent tasks.

The pool's processes do the work, the main process answers. What a process holds is told by the
records themselves, which its heartbeat writes: so the answer is what holds, not what the process
believes, and it comes even where that process is frozen.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Any

from celery import Celery, signature
from celery.app.task import Context
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_idempotent import doctor, shared_counters
from celery_idempotent.configuration.app_tasks import MAPPING, IdempotentTaskLike
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.key import Key
from celery_idempotent.lease.lease import MARGIN
from celery_idempotent.record.record import State
from celery_idempotent.store.record_query import RecordView
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.map_item import item_id

logger = logging.getLogger(__name__)

#: Seconds that a worker waits for Redis before it answers without it: it does nothing else then.
PATIENCE = 1.0
#: Seconds that the way to the workers and back may take, beside the time that they are given.
BROKER_PATIENCE = 2.0


@inspect_command()
def idempotency_leases(state: Any) -> list[dict[str, Any]] | dict[str, str]:
    """Leases that each process holds: since when, trusted how long, and the heartbeat's health."""
    asked: dict[RecordStore, dict[Key, tuple[IdempotentTaskLike, Any, str]]] = defaultdict(dict)
    for request in tuple(worker_state.active_requests):
        for task, key, task_id in _at_the_gate(request):
            asked[task.idempotency_configuration.executor.store][key] = task, request, task_id
    try:
        return [
            _lease(record_view, *calls[record_view.key])
            for store, calls in asked.items()
            for record_view in _look(store, calls)
            if _tells(record_view, *calls[record_view.key])
        ]
    except IdempotencyError as error:
        return {"error": str(error)}


@inspect_command()
def idempotency_counts(state: Any) -> dict[str, dict[str, int]]:
    """How often each task begun, replayed, met a conflict …, since the worker was started."""
    board = shared_counters.shared_counters
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
    replies: list[dict[str, Any]] = []

    def ask() -> None:
        try:
            replies.extend(
                app.control.broadcast("idempotency_counts", reply=True, timeout=timeout) or ()
            )
        except Exception as error:
            logger.debug("The workers could not be asked: %s", error)

    # A broker that takes a connection and says nothing is waited for without end.
    asking = Thread(target=ask, name="idempotency counts", daemon=True)
    asking.start()
    asking.join(timeout + BROKER_PATIENCE)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for reply in tuple(replies):
        for answer in reply.values():
            for task, one in answer.items() if "error" not in answer else ():
                found[task].update(one)
    return dict(found) if replies else None


def _at_the_gate(request: Any) -> list[tuple[IdempotentTaskLike, Key, str]]:
    """The tasks that a message may hold leases of, with their keys and the ids in their records."""
    try:
        if request.task.name in MAPPING:
            return list(_items(request))
        key: Key | None = request.idempotency_key()
    except Exception:  # not one of ours, or its arguments give no key: then it holds none
        return []
    return [] if key is None else [(request.task, key, request.id)]


def _items(request: Any) -> Iterator[tuple[IdempotentTaskLike, Key, str]]:
    """Those of a ``map``, ``starmap`` or ``chunks``, each of which passes the gate by itself."""
    called = request.kwargs
    task = signature(called["task"], app=request.app).type
    context = Context(request.request_dict)
    for number, item in enumerate(called["it"], 1):
        args = MAPPING[request.task.name](item)
        task_id = item_id(request.id, number)
        key, _ = resolve_key(
            task, request.id, context.headers, args, {}, request=context, item_id=task_id
        )
        if key is not None:
            yield task, key, task_id


def _look(store: RecordStore, keys: Iterable[Key]) -> list[RecordView]:
    with store.open_reader(PATIENCE) as open_reader:
        return [
            RecordView(key, open_reader.read(found), found.now, store)
            for key, found in open_reader.get(keys).items()
        ]


def _tells(record_view: RecordView, task: IdempotentTaskLike, request: Any, task_id: str) -> bool:
    """Whether it is a lease of this message: of many items, one is under way."""
    record = record_view.record
    assert record is not None
    return request.task is task or (
        record.state is State.STARTED
        and record.task_id == task_id
        and record.worker.endswith(f"/{request.worker_pid}")
    )


def _lease(
    record_view: RecordView, task: IdempotentTaskLike, request: Any, task_id: str
) -> dict[str, Any]:
    record, now = record_view.record, record_view.now
    assert record is not None
    told: dict[str, Any] = {
        "task": task.name,
        "task_id": request.id,
        "pid": request.worker_pid,
        "key": record.key,
    }
    if record.state is not State.STARTED or record.task_id != task_id:
        return told | {"heartbeat": "lost", "held_by": record.task_id, "state": record.state.value}
    assert record.deadline is not None
    assert record.started_at is not None
    lease = task.idempotency_configuration.settings.lease
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
