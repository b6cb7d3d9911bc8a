"""The message of a task that has ended for good is kept, so that a person can run it again.

It is kept as the signature that publishes it, in the serializer of the message. A rerun is a new
publish under the old task id, whose result then replaces the failure:

- Its root is derived from the message and the outcome that it replaces. If two people
  rerun it at once, or one repeats it after an error, the publishes are copies of one message, and
  one runs.
- It is published first; the receiving worker then forgets the outcome (`ForgetFirst`). A message
  that is lost on its way can be published again, and a process that dies in between leaves
  nothing half done. The message names the token of the outcome: of several messages for one
  outcome, only the first forgets it.
- It has no eta and no expiry, and may use all its retries again.
- It keeps its callbacks, the rest of its chain and its errbacks. It leaves its chord, which has
  already counted the failure and would count the call twice.
"""

from __future__ import annotations

import json
import time
from functools import partial

from celery import Celery
from celery.app.task import Context
from celery.canvas import Signature
from kombu.entity import Queue
from kombu.serialization import registry

from celery_idempotent.configuration.configuration import TaskConfiguration
from celery_idempotent.errors import CorruptRecordError, StoreUnavailableError
from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.flow import conflict
from celery_idempotent.flow.active_call import ActiveCall, Extension, Plan
from celery_idempotent.flow.end import End
from celery_idempotent.flow.executor import Executor
from celery_idempotent.flow.soft_limit import at_row
from celery_idempotent.key.canonical import digest
from celery_idempotent.key.key import ROOT_BYTES, Key
from celery_idempotent.record.payload import MESSAGE, Payload
from celery_idempotent.record.record import Record
from celery_idempotent.sql.database import Database
from celery_idempotent.store import commands
from celery_idempotent.store.run_sync import run_sync
from celery_idempotent.task import message_headers, outbox, republish
from celery_idempotent.task.message_headers import MessageHeaders

#: Options of the message that a rerun does not keep.
_DROPPED = ("chord", "countdown", "eta", "expires", "retries")


def keep(call: ActiveCall, request: Context) -> None:
    """Keeps the message of `request` for ``idempotency_error_ttl``. Never raises."""
    settings, key, task = call.settings, call.key, call.sender
    try:
        signature = task.signature_from_request(request, request.args, request.kwargs)
        options = {name: value for name, value in signature.options.items() if value is not None}
        if isinstance(queue := options.get("queue"), Queue):
            options["queue"] = {"name": queue.name}  # as JSON
        signature["options"] = options
        content_type = (request.properties or {}).get(republish.CONTENT_TYPE)
        serializer = registry.type_to_name.get(content_type) or task.serializer
        body = json.dumps(outbox.dump(signature, serializer)).encode()
        token = call.token or time.time_ns() // 1000
        message = run_sync(
            call.codec.protect(
                Payload("json", body), settings, key=str(key), token=token, field=MESSAGE
            )
        )
        if not message.format:
            report(table.MESSAGE_NOT_KEPT, call, error=message.body.decode())
            return
        store = call.runtime.store
        name = store.name(key.kept_message(call.task_id))
        store.query("SET", name, message.to_bytes(), "PX", settings.error_ms)
    except Exception as error:
        report(table.MESSAGE_NOT_KEPT, call, error=error)


def find(app: Celery, configuration: TaskConfiguration, key: Key, task_id: str) -> Signature | None:
    """Returns the message that was kept for `task_id`; None without one.

    Raises:
        IdempotencyError: if it cannot be read.
    """
    executor = configuration.executor
    message = executor.message(key, task_id)
    if message is None:
        return None
    stored = run_sync(executor.codec.decode_field(message, str(key), MESSAGE))
    try:
        return outbox.load(app, stored)
    except Exception as error:
        raise CorruptRecordError(
            f"{key}: its kept message cannot be read: {type(error).__name__}"
        ) from error


def publish(signature: Signature, key: Key, token: int) -> str:
    """Publishes `signature`, which has a task id, for `key`; returns the task id.

    Args:
        key: of a message that carries none.
        token: of the outcome that it replaces; 0 without one.

    Raises:
        Exception: of the broker.
    """
    options = signature.options
    task_id, headers = options["task_id"], options.get("headers")
    carried = MessageHeaders.read(signature.task, task_id, headers)
    root = digest(b"rerun" + carried.root + token.to_bytes(8, "big"), ROOT_BYTES)
    headers = message_headers.with_derived_key(
        headers, carried.key or key, task_id, root, forgets=token
    )
    for name in _DROPPED:
        options.pop(name, None)
    for link in options.get("chain") or ():
        link["options"].pop("chord", None)
    if isinstance(queue := options.get("queue"), dict):
        known = signature.app.amqp.queues.get(queue["name"])
        signature.set(**republish.to_queue(queue["name"]), declare=[known] if known else [])
    with republish.confirming_producer(signature.app) as producer:
        signature.set(headers=headers).apply_async(producer=producer)
    return str(task_id)


def plan_of_rerun(configuration: TaskConfiguration, token: int) -> Plan:
    """Returns the plan of a rerun that replaces the outcome with `token`."""
    first = partial(ForgetFirst, token, configuration.executor)
    return configuration.plan._replace(extensions=(first, *configuration.plan.extensions))


class ForgetFirst(Extension):
    """Forgets the outcome with `token` before the first begin; for blocking code.

    Args:
        executor: the task's executor.
    """

    def __init__(self, token: int, executor: Executor, call: ActiveCall) -> None:
        super().__init__(call)
        self._token, self._executor = token, executor

    async def before_begin(self) -> End | None:
        """Forgets the outcome; any other outcome stays, and the begin replays it."""
        try:
            forgotten = at_row(self._forget)
        except StoreUnavailableError as error:
            report(table.STORE_UNAVAILABLE, self.call)
            return conflict.requeue(self.call, error)
        except CorruptRecordError:
            return None  # the begin refuses it
        if forgotten:
            report(table.RUNS_AGAIN, self.call)
        return None

    def _forget(self) -> bool:
        executor, key = self._executor, self.call.key
        database: Database | None = self.call.settings.transaction
        record = run_sync(executor.store.get(key))
        row = database.find(executor.store.config.prefix, key) if database is not None else None
        shown: Record | str = commands.NO_RECORD
        if record is not None:
            if record.token != self._token or not record.state.finished:
                return False
            shown = record
        elif row is None or row.token != self._token:
            return False
        owner = row.owner if row is not None else ""
        return executor.forget(key, shown, database, owner) == "ok"
