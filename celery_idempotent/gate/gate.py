"""The flow: begin, then run, replay or refuse, then settle."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from celery_idempotent import signals
from celery_idempotent.errors import NotReadyError, StoreUnavailableError
from celery_idempotent.gate import conflict, settle
from celery_idempotent.gate.caller import Caller
from celery_idempotent.gate.execution import unprotected
from celery_idempotent.gate.replay import replay
from celery_idempotent.gate.running import Running
from celery_idempotent.lease.heartbeat import heartbeat
from celery_idempotent.record import layout
from celery_idempotent.record.layout import Begun
from celery_idempotent.store import commands
from celery_idempotent.store.payload import Payloads
from celery_idempotent.store.records import RecordStore
from celery_idempotent.store.scripts import Reply

logger = logging.getLogger(__name__)

OWNER_BYTES = 16
#: Unanswered passes that a message remembers; each is a begin that timed out.
PRIOR_PASSES = 8

#: Seconds between two looks of ``on_conflict="wait"``: soon at first, then five a second.
FIRST_LOOK, LAST_LOOK = 0.02, 0.2

_STORE_ERROR_SAYS = {
    "retry": "come back later",
    "run": "run without protection",
    "raise": "fail",
}


class Gate:
    """Lets calls through one at a time for each key."""

    def __init__(self, store: RecordStore, payloads: Payloads) -> None:
        self.store = store
        self.payloads = payloads

    def enter(self, call: Caller) -> Any:
        """The call's result: its own, or the one of the execution that it duplicates.

        Raises:
            KeyReusedError: the key belongs to a call with other arguments.
            ConflictError: the key is held, and the policy is ``raise``.
            CorruptRecordError: there is something under the key that cannot be read.
            StoreUnavailableError: Redis cannot be asked, and the policy is ``raise``.
            BaseException: whatever the work raises, and whatever a stored error was.
        """
        owner = os.urandom(OWNER_BYTES)
        sent_at = time.monotonic()
        give_up_at = sent_at + call.settings.wait_timeout
        look = FIRST_LOOK
        while True:
            try:
                answer = self._begin(call, owner)
            except StoreUnavailableError as error:
                return self._without_store(call, owner, error)
            if answer.case == "corrupt":
                raise layout.corrupt(str(call.key))
            if answer.case == "begun":
                return self._execute(call, layout.begun(answer.raw), sent_at)
            record = self.store.record(call.key, answer.raw)
            if answer.case == "finished":
                try:
                    return replay(call, record)
                except NotReadyError:
                    conflict.refuse(call, record)
            if answer.case == "reused":
                refusal = conflict.reused(record)
                logger.warning("Task %s is refused: %s", call.task_id, refusal)
                raise refusal
            if call.settings.on_conflict != "wait" or time.monotonic() + look > give_up_at:
                conflict.refuse(call, record)
            time.sleep(look)
            look = min(look * 1.5, LAST_LOOK)
            sent_at = time.monotonic()

    def _begin(self, call: Caller, owner: bytes) -> Reply:
        settings = call.settings
        command = commands.begin(
            call.key,
            owner=owner,
            prior=call.prior,
            task_id=call.task_id,
            worker=call.worker,
            lease_ms=settings.lease_ms,
            retention_ms=settings.result_ms,
            max_attempts=settings.max_attempts,
            error_ms=settings.error_ms,
        )
        return self.store.execute(command)

    def _execute(self, call: Caller, begun: Begun, sent_at: float) -> Any:
        running = Running(call, begun, self.store, self.payloads, sent_at)
        heartbeat.hold(running.lease)
        try:
            running.announce()
            try:
                value = call.run(running.execution)
                if running.interrupt is not None:
                    running.interrupt.over()
            except BaseException as error:
                return settle.with_error(running, error)
            return settle.with_result(running, value)
        finally:
            heartbeat.let_go(running.lease)

    def _without_store(self, call: Caller, owner: bytes, error: StoreUnavailableError) -> Any:
        policy = call.settings.on_store_error
        logger.error(
            "%s: %s; task %s will %s", call.key, error, call.task_id, _STORE_ERROR_SAYS[policy]
        )
        signals.send(
            signals.store_unavailable,
            call.sender,
            task_id=call.task_id,
            key=str(call.key),
            error=error,
            policy=policy,
        )
        if policy == "run":
            return call.run(unprotected(str(call.key)))
        if policy == "raise":
            raise error
        # Redis may have granted the begin whose answer was lost: the next pass must know it again.
        prior = (call.prior + owner)[-PRIOR_PASSES * OWNER_BYTES :]
        conflict.come_back(call, prior, error)
