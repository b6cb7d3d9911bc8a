"""What `purge` locks while other transactions are open, under the strictest isolation."""

from __future__ import annotations

import sqlalchemy as sa

from celery_idempotent.contrib.sqlalchemy import outcomes
from celery_idempotent.key.key import Key
from celery_idempotent.sql.database import Database
from celery_idempotent.sql.outcomes import Claim, Row
from celery_idempotent.sql.transaction import Transaction
from tests.sql.conftest import each_server_kind
from tests.sql.databases import TestDatabase, new_engine
from tests.sql.test_purge import insert_rows


@each_server_kind
def test_passes_by_rows_that_are_taken_over_and_blocks_no_claim(
    database: TestDatabase, order: str
) -> None:
    insert_rows(database, 5, expires_at=1000)
    engine = new_engine(database.url, isolation_level="SERIALIZABLE")
    claim = Claim.of(Key("task", order), "")
    during: list[Row | None] = []

    @sa.event.listens_for(engine, "commit")
    def claim_another(_: sa.Connection) -> None:
        transaction = Transaction(Database(database.engine))
        during.extend(transaction.begin([claim]))
        transaction.rollback()

    expired = sa.select(outcomes.c.id).where(outcomes.c.expires_at == 1000)
    with database.engine.begin() as connection:
        taken = connection.execute(expired.limit(1)).scalar_one()
        connection.execute(outcomes.update().where(outcomes.c.id == taken).values(expires_at=None))
        assert Database(engine).purge(500)[0] == 4
    engine.dispose()

    assert during == [None], "no claim waits"
    with database.engine.connect() as connection:
        assert connection.execute(sa.select(outcomes.c.id)).scalars().all() == [taken]
