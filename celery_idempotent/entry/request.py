"""A running task as the worker's main process sees it."""

from __future__ import annotations

import logging
from signal import SIGKILL
from typing import Any

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery.platforms import signals
from celery.worker.request import Request

from celery_idempotent.entry.caller import worker_name
from celery_idempotent.entry.passage import Passage
from celery_idempotent.key.key import Key
from celery_idempotent.store import commands

#: Seconds between Celery's word that a time limit is over and the end of the child, at most.
KILL_GRACE = 1.0

logger = logging.getLogger(__name__)


class IdempotentRequest(Request):
    """Ends the lease of a pool child that died, so that the redelivered message runs at once."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """As Celery's; a lost child's lease is abandoned before its message goes back."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)):
            self._abandon(grace=0.0)
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """As Celery's; SIGKILL leaves the child no time to give its key back itself."""
        super().terminate(pool, signal)
        if self.time_start and signals.signum(signal or TERM_SIGNAME) == SIGKILL:
            self._abandon(grace=0.0)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """As Celery's; at a hard time limit the lease ends, shortly after the child."""
        if not soft:
            self._abandon(grace=KILL_GRACE)
        return super().on_timeout(soft, timeout)

    def idempotency_key(self) -> Key | None:
        """The key that this message has at the gate; None if it goes through ungated.

        Raises:
            KeyRuleError: if there is none for its arguments.
        """
        configured = self.task.idempotency_configuration
        carried = Passage.read(self.task.name, self.id, self._context.headers)
        if carried.ungated or not configured.settings.enabled:
            return None
        key: Key = carried.key or configured.rule.derive(
            self.args, self.kwargs, task_id=self.id, explicit=carried.explicit
        )
        return key

    def _abandon(self, grace: float) -> None:
        try:
            key = self.idempotency_key()
            if key is None or self.worker_pid is None:
                return
            self.task.idempotency_configuration.gate.store.execute(
                commands.abandon(
                    key,
                    self.id,
                    worker_name(self.hostname, self.worker_pid),
                    grace_ms=round(grace * 1000),
                )
            )
        except Exception as trouble:
            # The lease ends by itself; the message must go back whatever happens here.
            logger.warning(
                "The lease of task %s, whose worker process died, was not ended early: %s",
                self.id,
                trouble,
            )
