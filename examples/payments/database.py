"""The ledger's database, as the tasks use it: `idempotency_transaction` is its engine."""

from __future__ import annotations

import os
import time
from typing import Any

from sqlalchemy import Connection, create_engine, event

from . import provider
from .ledger import BUSY_TIMEOUT_SECONDS

#: The SQLite file that holds the ledger and the outcomes; set for workers only.
LEDGER_VARIABLE = "PAYMENTS_LEDGER"

engine = create_engine(
    f"sqlite:///{os.environ.get(LEDGER_VARIABLE, '')}",
    connect_args={"timeout": BUSY_TIMEOUT_SECONDS},
)


def hang_after_commit(connection: Connection) -> None:
    """Makes this process slow right after the COMMIT of the connection's transaction."""
    connection.info["hangs"] = True


@event.listens_for(engine, "connect")
def _connected(connection: Any, _: object) -> None:
    connection.execute("PRAGMA synchronous = NORMAL")


@event.listens_for(engine, "checkin")
def _hang(_: object, record: Any) -> None:
    """Is called when a connection is returned to the pool: the first thing after a COMMIT."""
    if record.info.pop("hangs", False):
        time.sleep(provider.HANGING_SECONDS)
