"""The combined write: one script stores an outcome and the task's result in the result backend."""

from __future__ import annotations

from typing import Any, Protocol, cast

from celery_idempotent.flow.call import Complete
from celery_idempotent.flow.extension import Extension
from celery_idempotent.flow.flow import Settlement
from celery_idempotent.flow.outcome import Result
from celery_idempotent.store.commands import BackendResult


class BackendHost(Protocol):
    """The host of a call whose value goes to a result backend."""

    def backend_result(self, value: Any) -> BackendResult | None:
        """What the result backend is to store for `value`; None if Celery has to do that."""


class CombinedWrite(Extension):
    """Adds the result to the command that completes the record."""

    async def settling(self, settlement: Settlement) -> Settlement:
        """Encodes the value as the result backend does."""
        if isinstance(settlement.disposition, Complete) and isinstance(settlement.outcome, Result):
            host = cast("BackendHost", self.call.host)
            settlement.backend_result = host.backend_result(settlement.outcome.value)
        return settlement
