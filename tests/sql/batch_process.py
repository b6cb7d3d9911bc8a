"""Runs a batch in a process that the test kills: URL of Redis, of the database, prefix, keys."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from celery_idempotent import Idempotency
from celery_idempotent.flow import flow
from tests.sql.databases import effects, new_engine

url, database_url, prefix, *keys = sys.argv[1:]
idem = Idempotency(url, key_prefix=prefix, lease=1, transaction=new_engine(database_url))


async def die(*_: object) -> NoReturn:
    """Kills the process after the commit, before the records are completed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


flow._store = die
with idem.begin_many(keys) as batch:
    for key in batch.pending:
        batch.connection.execute(effects.insert().values(name=key, pid=os.getpid()))
    batch.complete_many(dict.fromkeys(keys, f"receipt-{os.getpid()}"))
