"""A chord's claim by a process that has died: a redelivery waits until it expires.

Since Celery 5.7, the last member of a chord claims the chord in Celery's Redis backend before it
publishes the body. If its process dies in between, Celery ignores the count of a redelivery that
comes before the claim expires, about 20 s later, and the body would never be published.
"""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.app.task import Context

from celery_idempotent.events import table
from celery_idempotent.events.report import report
from celery_idempotent.flow import conflict
from celery_idempotent.flow.active_call import ActiveCall, Extension
from celery_idempotent.flow.end import Admission, Finished


class ChordClaim(Extension):
    """Puts a message back that would count in a claimed chord; for blocking code."""

    def __init__(self, task: Task, request: Context, call: ActiveCall) -> None:
        super().__init__(call)
        self._task, self._request = task, request

    async def admitted(self, admission: Admission) -> Admission:
        """Replaces a replay that would count."""
        if not isinstance(admission, Finished) or admission.sent is not False:
            return admission
        seconds = self._seconds_left()
        if not seconds:
            return admission
        reason = conflict.error(
            f"{self.call.key}: the chord of the task is claimed by a process that may have died",
            admission.record,
        )
        report(table.CONFLICTED, self.call, record=admission.record, policy="retry")
        requeued = conflict.requeue(self.call, reason, self.call.unanswered_ids)
        return requeued._replace(seconds=seconds)

    def _seconds_left(self) -> float:
        """Returns the time until the claim expires; 0 if there is none."""
        from celery.backends.redis import RedisBackend

        backend: Any = self._task.backend
        if not isinstance(backend, RedisBackend):
            return 0.0
        try:
            claim = backend.get_key_for_group(self._request.group, ".c")
            if backend.client.get(claim) in (None, b"done"):
                return 0.0
            return float(max(0, backend.client.pttl(claim)) / 1000)
        except Exception:
            return 0.0  # Celery will report that it cannot count
