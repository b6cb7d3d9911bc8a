"""Extensions: options plug into the flow of a call at named points."""

from __future__ import annotations

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.end import Admission, End, Settlement
from celery_idempotent.store.scripts import Reply


class Extension:
    """The effect of one option on one call. A subclass overrides the points that it needs."""

    def __init__(self, call: ActiveCall) -> None:
        self.call = call

    async def before_begin(self) -> End | None:
        """Called before the first begin; returns None, or an end of the call."""
        return None

    async def admitted(self, admission: Admission) -> Admission:
        """Called after each begin; returns the admission or replaces it."""
        return admission

    async def settling(self, settlement: Settlement) -> Settlement | End:
        """Called before an outcome is stored or a key released; returns what counts instead."""
        return settlement

    async def settled(self, settlement: Settlement, reply: Reply) -> None:
        """Called after the outcome was stored."""

    def ended(self) -> None:
        """Called at the end of the flow, however it ends. Never raises, and may be called again."""
