"""``celery idempotency purge`` deletes expired rows."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_idempotent.contrib.sqlalchemy import outcomes
from celery_idempotent.core.key import Key
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, Row
from celery_idempotent.sql.transaction import Transaction
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind_in_full, kinds, run_celery
from tests.sql.databases import LIBRARIES, TestDatabase, new_engine

YEAR_3000 = 32_503_680_000_000


def insert_rows(database: TestDatabase, rows: int, expires_at: int | None, **columns: Any) -> None:
    texts = ("record_key", "owner", "task_id", "worker", "fingerprint", "format")
    values: dict[str, Any] = dict.fromkeys(texts, "") | {"state": "COMPLETED", "body": b"1"}
    values |= dict.fromkeys(("token", "attempt", "finished_at"), 1)
    values |= {"expires_at": expires_at, **columns}
    with database.engine.begin() as connection:
        connection.execute(outcomes.insert(), [{**values, "id": uuid4().hex} for _ in range(rows)])


def purge(server: RedisServer, database: TestDatabase, library: str, *options: str) -> Any:
    done = run_celery(server, database, library, "idempotency", "purge", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.slow
@each_kind_in_full
def test_deletes_expired_rows_only(server: RedisServer, database: TestDatabase) -> None:
    insert_rows(database, 3, expires_at=YEAR_3000)
    insert_rows(database, 1, expires_at=None)

    for library in LIBRARIES:
        insert_rows(database, 250, expires_at=1000)
        printed = purge(server, database, library, "--batch", "100")
        assert list(printed["deleted"].values()) == [250]
    with database.engine.connect() as connection:
        left = connection.execute(sa.select(sa.func.count()).select_from(outcomes)).scalar_one()
    assert left == 4


@pytest.mark.parametrize("database", kinds("postgresql", "mariadb")[1:], indirect=True)
def test_passes_by_rows_taken_over_and_blocks_no_claim(database: TestDatabase, order: str) -> None:
    """Other transactions are open, under the strictest isolation."""
    insert_rows(database, 5, expires_at=1000)
    engine = new_engine(database.url, isolation_level="SERIALIZABLE")
    claim = Claim.of(Key("task", order), "")
    during: list[Row | None] = []

    @sa.event.listens_for(engine, "commit")
    def claim_another(_: sa.Connection) -> None:
        transaction = Transaction(Database(database.engine))
        during.append(transaction.begin(claim))
        transaction.rollback()

    expired = sa.select(outcomes.c.id).where(outcomes.c.expires_at == 1000)
    with database.engine.begin() as connection:
        taken = connection.execute(expired.limit(1)).scalar_one()
        connection.execute(outcomes.update().where(outcomes.c.id == taken).values(expires_at=None))
        assert Database(engine).purge(500)[0] == 4
    engine.dispose()

    assert during == [None], "no claim waits"
    with database.engine.begin() as connection:
        assert connection.execute(sa.select(outcomes.c.id)).scalars().all() == [taken]
        connection.execute(outcomes.delete())
