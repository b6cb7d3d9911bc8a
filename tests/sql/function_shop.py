"""A function with a transaction, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent import Idempotency
from tests.sql.databases import TestDatabase, effects


class Shop:
    """A function that writes one effect for each run."""

    def __init__(self, idem: Idempotency, database: TestDatabase, **options: Any) -> None:
        self.idem = idem
        self.database = database
        self.effects, self.rows = database.effects, database.rows
        self.runs = 0
        self.during: Callable[[], Any] = lambda: None
        options = {"transaction": database.engine, **options}
        self.charge = idem.idempotent(key="{order}", name="charge", **options)(self._charge)

    def _charge(self, order: str, amount: int = 1) -> Any:
        self.runs += 1
        insert = effects.insert().values(name=order, pid=0)
        self.idem.current.connection.execute(insert)
        return self.during() or [order, amount, self.runs]


def forget_records(idem: Idempotency) -> None:
    """Removes all records, as FLUSHALL or a failover to an empty replica does."""
    idem.executor.store.client.flushdb()
