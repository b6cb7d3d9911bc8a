"""Claims and commits rows of its own, as tasks do."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from uuid import uuid4

import sqlalchemy as sa

from celery_idempotent.core.key.key import Key
from celery_idempotent.core.record.record import State
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, OutcomeValues
from celery_idempotent.sql.transaction import Transaction

_CLAIMS_PER_SECOND = 100


def a_claim() -> Claim:
    """Returns the claim of a key of its own."""
    return Claim.of(Key("shop.charge", uuid4().hex[:22]), "idem")


def write(url: str, pipe: Connection) -> None:
    """Claims and commits rows until `pipe` says stop; sends the times of claims on request."""
    database = Database(sa.create_engine(url))
    claims: list[float] = []
    while True:
        if pipe.poll():
            if pipe.recv() == "stop":
                return
            pipe.send(claims)
            claims = []
        started = time.perf_counter()
        transaction, claim = Transaction(database), a_claim()
        assert transaction.begin(claim) is None
        claims.append((time.perf_counter() - started) * 1000)
        ended = OutcomeValues(State.COMPLETED, "json", b"1", 86_400_000)
        transaction.commit(claim, ended)
        time.sleep(max(0.0, 1 / _CLAIMS_PER_SECOND - (time.perf_counter() - started)))
