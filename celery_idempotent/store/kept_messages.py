"""Messages of tasks that have ended for good, beside the records of their keys.

A message is written after its task ends, and expires by itself; an operator can run it again.
Every function raises StoreUnavailableError if Redis does not reply.
"""

from __future__ import annotations

from celery_idempotent.key.key import Key
from celery_idempotent.record.payload import Payload
from celery_idempotent.store.record_store import RecordStore


def keep(store: RecordStore, key: Key, task_id: str, message: Payload, keep_ms: int) -> None:
    """Writes `message`, replacing an earlier one of the task id."""
    store.query("SET", _name(store, key, task_id), message.to_bytes(), "PX", keep_ms)


def find(store: RecordStore, key: Key, task_id: str) -> Payload | None:
    """Returns the kept message of `task_id`, or None."""
    value = store.query("GET", _name(store, key, task_id))
    return None if value is None else Payload.from_bytes(value)


def delete(store: RecordStore, key: Key, task_id: str) -> Payload | None:
    """Deletes the kept message of `task_id` and returns it."""
    message = find(store, key, task_id)
    if message is not None:
        store.query("DEL", _name(store, key, task_id))
    return message


def _name(store: RecordStore, key: Key, task_id: str) -> str:
    return store.name(key.kept_message(task_id))
