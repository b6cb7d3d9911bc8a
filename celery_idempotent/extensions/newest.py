"""Newest arguments: the message that waits runs with those of the last publish.

With ``idempotency_until="started"`` at most one message of a key waits. A publish that finds one
sends none: its arguments replace those of the waiting message, in that message's record. There they
survive its reservation, a put-back and a crash. The begin returns them, and a retry carries them.

A publish that must send its message (its arguments are larger than `MAX_BYTES`, its caller has
chosen the task id, or it is part of a canvas) takes the place of the waiting message instead. That
one does not run: it gets the outcome of the newer one. So does a message whose execution has died,
if one that was published later begins before its redelivery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kombu.serialization import prepare_accept_content

from celery_idempotent.core.events import table
from celery_idempotent.core.events.report import report, report_refused
from celery_idempotent.core.flow import conflict
from celery_idempotent.core.flow.call import Call
from celery_idempotent.core.flow.extension import Extension
from celery_idempotent.core.flow.values import (
    AGAIN,
    GRANTED,
    Admission,
    Answer,
    Failure,
    Finished,
    Result,
)
from celery_idempotent.core.record import ARGUMENTS, Payload, Record, layout, steps
from celery_idempotent.core.store import commands
from celery_idempotent.core.task.publish.dedupe import Publication
from celery_idempotent.core.task.publish.message_copy import representations
from celery_idempotent.errors import CorruptRecordError, NotReadyError, ResultNotStoredError
from celery_idempotent.settings import Settings

#: Larger arguments, as stored, are not kept in Redis.
MAX_BYTES = 16 * 1024
#: Seconds after the last publish for which the arguments of a waiting message are kept.
KEEP = 7 * 86400
#: Instead of arguments, in lua/queue.lua: the message takes the place of the waiting one.
TAKES_PLACE = b"="


class Newest(Extension):
    """Runs the body with the newest arguments, or ends a message that a newer one answers for."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        if call.settings.takes_newest and call.key.fingerprint:
            call.replaces = commands.REPLACES_DEAD

    @classmethod
    def reserving(cls, settings: Settings, publication: Publication) -> dict[str, Any]:
        """Returns the arguments that replace those of the waiting message, if there is one."""
        entry, task = TAKES_PLACE, publication.task
        serializer = publication.options.get("serializer") or task.serializer
        if serializer == "pickle":
            # pickle would give the worker a tuple, whose members it could not replace.
            publication.args = [*publication.args]
        if not publication.is_always_sent:
            arguments, key = (publication.args, publication.kwargs), str(publication.identity.key)
            codec = task.idempotency_configuration.executor.codec
            payload = codec.encode_newest(arguments, serializer, settings, key)
            if len(payload.body) <= MAX_BYTES:
                entry = steps.write_arguments(payload.format, payload.body)
        return {"arguments": entry, "keep_ms": max(KEEP * 1000, settings.hold_ms)}

    @classmethod
    def findings(cls, task: Any) -> Iterator[Sequence[str]]:
        """Yields that bursts are not collapsed."""
        if not task.idempotency_configuration.settings.collapses:
            yield (
                *("bursts", "warning"),
                "idempotency_until is 'started', and idempotency_dedupe_publish is off",
                "idempotency_dedupe_publish = True",
                "every call of a burst is published, and runs",
            )

    async def admitted(self, admission: Admission) -> Admission:
        """Gives the host the newest arguments; answers a superseded message by the newer one."""
        if isinstance(admission, Finished) and layout.is_superseded(admission.record):
            return await self._outcome(admission.record)
        # Only at the first begin. A retry, or a message after ``Task.replace``, brings its
        # arguments.
        if admission is GRANTED and not self.call.data.generation:
            assert self.call.grant is not None
            if self.call.grant.steps_body:
                await self._use_newest(self.call.grant.steps_body)
        return admission

    async def _use_newest(self, steps_body: bytes) -> None:
        """Replaces the arguments of the call by the newest ones, if the record has any."""
        call, key = self.call, str(self.call.key)
        host: Any = call.host
        try:
            stored = steps.read(steps_body, key).get(steps.NEWEST_ARGUMENTS)
            if stored is None:
                return
            accept = prepare_accept_content(call.sender.app.conf.accept_content)
            payload = Payload(*stored)
            newest = await call.codec.decode_field(payload, key, ARGUMENTS, accept)
            args, kwargs = [*newest[0]], {**newest[1]}
            _change_arguments(call.sender.app, host.request, args, kwargs)
            host.use_arguments(args, kwargs)
            call.tail = call.sender.idempotency_configuration.tail_of(args, kwargs)
        except (IndexError, KeyError, TypeError, ValueError):
            raise report_refused(call, steps.corrupt(ARGUMENTS, key)) from None
        except CorruptRecordError as error:
            raise report_refused(call, error) from None

    async def _outcome(self, record: Record) -> Admission:
        """Returns the outcome of the newer message, or waits for it.

        If nothing of the newer message is left, this one runs after all.
        """
        call, store = self.call, self.call.runtime.store
        try:
            newer = layout.read_task_id(record.body)
        except ValueError:
            raise report_refused(call, layout.corrupt(str(call.key))) from None
        key, now_ms = call.key.of_message(newer), store.now_ms()
        # First the slot, then the record. The other way around, a message that begins in between
        # would be in neither.
        slot, stored = await store.slot(call.key), await store.read(key)
        found = store.record(key, stored.raw) if stored else None
        if found is not None and found.state.finished:
            return await self._outcome(found) if layout.is_superseded(found) else Finished(found)
        if found is None or found.at_ms <= now_ms:
            found = slot if slot and slot.task_id == newer else None
        if found is not None:
            policy = conflict.policy_for(call, found, puts_back=True)
            report(table.CONFLICTED, call, record=found, policy=policy)
            reason = conflict.held(call, found)
            longest = conflict.LONGEST_DELAY
            return conflict.put_back(call, reason, longest)._replace(record=found)
        try:
            value, failed = await call.codec.decode_outcome(record)
        except (NotReadyError, ResultNotStoredError):
            await call.runtime.execute(commands.forget(call.key, record))
            return AGAIN
        report(table.REPLAYED, call, record=record)
        return Answer(Failure(value) if failed else Result(value), record, replayed=True)


def _change_arguments(app: Any, request: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Gives the message of `request`, whose body is about to run, other arguments.

    Celery's tracer has the same list and dictionary as the request, so they are changed in place.
    """
    request.update(representations(request, args, kwargs, app))
    if isinstance(request.args, list):
        request.args[:] = args
    else:
        request.args = args
    request.kwargs.clear()
    request.kwargs.update(kwargs)
