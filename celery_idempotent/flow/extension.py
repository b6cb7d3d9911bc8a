"""What an option adds to the flow of a call, at named points."""

from __future__ import annotations

from celery_idempotent.flow.active_call import ActiveCall
from celery_idempotent.flow.end import Admission, End, Settlement
from celery_idempotent.store.scripts import Reply


class Extension:
    """One option in one pass of a call through the flow; a subclass overrides what it needs."""

    def __init__(self, call: ActiveCall) -> None:
        self.call = call

    async def before_begin(self) -> End | None:
        """Before the first begin; an end that is returned is that of the call."""
        return None

    async def admitted(self, admission: Admission) -> Admission:
        """After each begin: returns what the call may do."""
        return admission

    async def settling(self, settlement: Settlement) -> Settlement | End:
        """Before the outcome is stored, or the key is released."""
        return settlement

    async def settled(self, settlement: Settlement, reply: Reply) -> None:
        """After the outcome was stored."""

    def ended(self) -> None:
        """The flow has ended, in whatever way. Never raises; may be called again."""
