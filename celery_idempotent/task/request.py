"""A running task as the worker's main process sees it."""

from __future__ import annotations

import logging
import time
from signal import SIGKILL
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.platforms import signals
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks

from celery_idempotent.key.key import Key
from celery_idempotent.record import layout, steps
from celery_idempotent.record.record import State
from celery_idempotent.store import commands
from celery_idempotent.task import canvas
from celery_idempotent.task.call import acknowledged, generation_of, worker_name
from celery_idempotent.task.key_resolution import resolve_key
from celery_idempotent.task.republish import CONTENT_TYPE
from celery_idempotent.task.requeue import seconds_until

#: Seconds between Celery's word that a time limit is over and the end of the child, at most.
KILL_GRACE = 1.0

logger = logging.getLogger(__name__)


class IdempotentRequest(Request):
    """Ends the lease of a pool child that died, so that the redelivered message runs at once.

    And the reservation of a message that is discarded, so that the next one is published at once.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As Celery's, which keeps from the pool how the message is written, but for AMQP's."""
        super().__init__(*args, **options)
        properties = self.request_dict.get("properties") or {}
        if self.content_type:
            properties = {**properties, CONTENT_TYPE: self.content_type}
            self.request_dict["properties"] = properties

    def revoked(self) -> bool:
        """As Celery's, but lets a copy of a message through that runs already, or is done.

        Celery would overwrite the state of the execution, count it in its chord as failed, and
        acknowledge the copy, which may be all that is left if the execution dies. At the gate the
        copy is put back, or gets the outcome.
        """
        if self._began():
            return False
        revoked: bool = super().revoked()
        if revoked:
            self._give_back()
        return revoked

    def _began(self) -> bool:
        """Whether an execution of this message, which is expired or revoked, has begun.

        One that began in time does not expire, even if it dies and runs again. One that is revoked
        does not run again.
        """
        expired = self.expires is not None and not seconds_until(self.expires)
        revoked = self.id in revoked_tasks
        if not (expired or revoked):
            return False
        try:
            key = self.idempotency_key()
            if key is None:
                return False
            store = self.task.idempotency_configuration.executor.store
            answer = store.execute(commands.get(key))
            raw = answer.raw if answer.case == "absent" else answer.raw.partition(b" ")[2]
            if not raw:
                return False
            record = store.record(key, raw)
            if record.task_id == self.id and record.state is State.STARTED:
                return not revoked or record.at_ms > answer.now_ms
            if record.state.finished:
                return bool(record.task_id == self.id)
            return layout.write_task_id(self.id) in steps.ended_task_ids(record.body, record.key)
        except Exception as trouble:
            logger.warning(
                "Task %s is expired or revoked, and is discarded even if a copy of it runs: %s",
                self.id,
                trouble,
            )
            return False

    def _give_back(self) -> None:
        try:
            key = self.idempotency_key()
            if key is not None:
                self.task.idempotency_configuration.executor.store.execute(
                    commands.reserve(key, self.id, hold_ms=0)
                )
        except Exception as trouble:
            logger.warning(
                "The reservation of task %s, which is discarded, ends by itself: %s",
                self.id,
                trouble,
            )

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """As Celery's; a lost child's lease is abandoned before its message goes back."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)):
            last = error if isinstance(error, WorkerLostError) and not self._goes_back() else None
            if return_ok:
                # The child lives, has raised what another one left, and has sent what follows.
                canvas.drop_continuation(self._context)
            elif self._abandon(0.0, last):
                returned = super().on_failure(exc_info, send_failed_event, return_ok)
                self._note_errbacks()
                return returned
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """As Celery's; SIGKILL leaves the child no time to give its key back itself."""
        super().terminate(pool, signal)
        if self.time_start and signals.signum(signal or TERM_SIGNAME) == SIGKILL:
            self._abandon(grace=0.0)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """As Celery's; at a hard time limit the lease ends, shortly after the child."""
        if soft:
            return super().on_timeout(soft, timeout)
        last = TimeLimitExceeded(timeout) if acknowledged(self.task, "timeout") else None
        ended = self._abandon(KILL_GRACE, last)
        returned = super().on_timeout(soft, timeout)
        if ended:
            self._note_errbacks()
        return returned

    def idempotency_key(self) -> Key | None:
        """Returns the key of this message, None if it is not protected.

        Raises:
            KeyRuleError: if the rule cannot derive a key from the arguments.
        """
        context = self._context
        key, _ = resolve_key(
            self.task, self.id, context.headers, self.args, self.kwargs, request=context
        )
        return key

    def _goes_back(self) -> bool:
        """Whether the message of a lost worker process is handed out, or published, again."""
        task = self.task
        return (
            (task.acks_late and task.reject_on_worker_lost)
            or getattr(task, "retry_on_worker_lost", False)  # since Celery 5.7
            or not acknowledged(task, "failure")
        )

    def _abandon(self, grace: float, last: Exception | None = None) -> bool:
        """End the child's lease.

        Args:
            last: the error that Celery stores in acknowledging the message.

        Returns:
            Whether copies of the message get that error from now on.
        """
        try:
            key = self.idempotency_key()
            if key is None or self.worker_pid is None:
                return False
            configured = self.task.idempotency_configuration
            error, executor, settings = None, configured.executor, configured.settings
            if last is not None:
                # The token is in the child's memory; what it names in the depot must be unique.
                token = time.time_ns() // 1000
                error = executor.codec.of_error(last, settings, key=str(key), token=token)
            answer = executor.store.execute(
                commands.abandon(
                    key,
                    self.id,
                    worker_name(self.hostname, self.worker_pid),
                    grace_ms=round(grace * 1000),
                    generation=generation_of(self._context),
                    error=error,
                    error_ms=settings.error_ms,
                )
            )
            return last is not None and answer.case == "ok"
        except Exception as trouble:
            # The lease ends by itself; the message must go back whatever happens here.
            logger.warning(
                "The lease of task %s, whose worker process died, was not ended early: %s",
                self.id,
                trouble,
            )
            return False

    def _note_errbacks(self) -> None:
        """Celery has sent what follows the failure from here, where no task is under way."""
        if not canvas.has_continuation(self._context):
            return
        try:
            key = self.idempotency_key()
            assert key is not None
            self.task.idempotency_configuration.executor.store.execute(
                commands.mark_continued(key, self.id)
            )
        except Exception as trouble:
            logger.warning(
                "A redelivery of task %s may send its errbacks again: %s", self.id, trouble
            )
