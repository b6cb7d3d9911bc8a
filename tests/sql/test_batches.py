"""Batches with a transaction: the effects and the outcomes of all keys are committed together."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_idempotent import Decision, Idempotency, PoisonedTaskError, TransactionError
from celery_idempotent.errors import (
    IdempotencyError,
    KeyReusedError,
    SettingsError,
    StoreUnavailableError,
)
from celery_idempotent.flow import flow
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind, forget_records, hold_row, poison
from tests.sql.databases import REPOSITORY, TestDatabase, effects, new_engine
from tests.waiting import SOON, eventually

pytestmark = each_kind

RUN, REPLAY = Decision.RUN, Decision.REPLAY


class Shop:
    """An engine whose batches write one effect for each key."""

    def __init__(self, url: str, database: TestDatabase, **options: Any) -> None:
        options = {"transaction": database.engine, "key_prefix": uuid4().hex, **options}
        self.idem = Idempotency(url, **options)
        self.database = database

    def charge(self, keys: list[str], receipt: str = "paid") -> list[Any]:
        """Returns the outcome of each key: of this batch, or of an earlier one."""
        with self.idem.begin_many(keys) as batch:
            self.write(batch)
            assert batch.complete_many(dict.fromkeys(batch.pending, receipt)) == {}
        return [receipt if entry.decision is RUN else entry.replay for entry in batch]

    def counted(self, keys: list[str]) -> list[int]:
        return [self.database.effects(key) for key in keys]

    def write(self, batch: Any) -> None:
        for key in batch.pending:
            batch.connection.execute(effects.insert().values(name=key, pid=0))


@pytest.fixture
def shop(server: RedisServer, database: TestDatabase) -> Iterator[Shop]:
    shop = Shop(server.url, database)
    yield shop
    shop.idem.close()


@pytest.fixture
def keys() -> list[str]:
    return [uuid4().hex for _ in range(5)]


class TestDuplicates:
    def test_without_their_records_too(self, shop: Shop, keys: list[str]) -> None:
        assert shop.charge(keys[:3], "first") == ["first"] * 3
        for _ in range(2):
            expected = ["first"] * 3 + ["second"] * 2
            assert shop.charge(keys, "second") == expected
            forget_records(shop.idem)
            assert shop.charge(keys[::-1], "third") == expected[::-1]
        assert shop.counted(keys) == [1] * 5

    def test_beside_single_calls(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.execution(keys[0]) as execution:
            execution.connection.execute(effects.insert().values(name=keys[0], pid=0))
            execution.complete("single")
        forget_records(shop.idem)

        assert shop.charge(keys, "batch") == ["single"] + ["batch"] * 4
        forget_records(shop.idem)
        with shop.idem.execution(keys[1]) as execution:
            assert execution.replay == "batch"
        assert shop.counted(keys) == [1] * 5

    def test_expired_rows_are_taken_over(
        self, server: RedisServer, database: TestDatabase, keys: list[str]
    ) -> None:
        shop = Shop(server.url, database, result_ttl=1)
        shop.charge(keys, "first")
        eventually(lambda: shop.charge(keys, "second") == ["second"] * 5, "the rows have expired")
        assert shop.counted(keys) == [2] * 5
        shop.idem.close()

    def test_other_arguments_are_refused(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.begin_many(keys[:2], [1, 1]) as batch:
            shop.write(batch)
            batch.complete_many()
        forget_records(shop.idem)
        with shop.idem.begin_many(keys[:2], [2, 1]) as batch:
            assert [entry.decision for entry in batch] == [Decision.REJECTED, REPLAY]
        assert isinstance(batch[0].error, KeyReusedError)

    def test_a_committed_key_without_attempts_left_is_replayed(
        self, shop: Shop, keys: list[str]
    ) -> None:
        shop.charge(keys[:1])
        for key in keys[:2]:
            poison(shop.idem.executor, shop.idem.key_of(key))
        with shop.idem.begin_many(keys[:2]) as batch:
            assert (batch[0].decision, batch[0].replay) == (REPLAY, "paid")
            assert isinstance(batch[1].error, PoisonedTaskError)

    @pytest.mark.exhaustive
    def test_a_process_killed_after_its_commit(
        self, server: RedisServer, database: TestDatabase, keys: list[str]
    ) -> None:
        prefix = uuid4().hex
        victim = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.sql.test_batches"),
                *(server.url, database.url, prefix, *keys[:3]),
            ],
            cwd=REPOSITORY,
        )
        assert victim.wait(SOON) == -signal.SIGKILL
        shop = Shop(server.url, database, key_prefix=prefix)
        receipt = f"receipt-{victim.pid}"

        def is_over() -> bool:
            with shop.idem.begin_many(keys[:3]) as batch:
                return [entry.decision for entry in batch] == [REPLAY] * 3

        eventually(is_over, "the leases have expired")
        assert shop.charge(keys) == [receipt] * 3 + ["paid"] * 2
        assert shop.counted(keys) == [1] * 5
        shop.idem.close()


class TestAtTheSameTime:
    def test_overlapping_keys_in_opposite_order(self, database: TestDatabase) -> None:
        """Without Redis, the batches meet at the rows; none waits for the other in a circle."""
        keys = [uuid4().hex for _ in range(30)]
        options = {"key_prefix": keys[0], "on_store_error": "run"}
        shops = [Shop("redis://127.0.0.1:1/0", database, **options) for _ in range(2)]
        outcomes: list[list[Any]] = [[], []]
        before = deadlocks(database)
        barrier = threading.Barrier(2)

        def charge(n: int) -> None:
            for first in range(0, 30, 6):
                own = keys[first : first + 6][:: 1 if n else -1]
                barrier.wait(SOON)
                outcomes[n] += shops[n].charge(own, f"of {n}")[:: 1 if n else -1]

        threads = [threading.Thread(target=charge, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert len(outcomes[0]) == 30
        assert outcomes[0] == outcomes[1]
        assert shops[0].counted(keys) == [1] * 30
        assert deadlocks(database) == before


def deadlocks(database: TestDatabase) -> int:
    """Returns the number of deadlocks that PostgreSQL has ended; 0 for other databases."""
    if database.kind != "postgresql":
        return 0
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    with database.engine.connect() as connection:
        return connection.execute(sa.text(query)).scalar_one()


class TestReleased:
    def test_keys_leave_no_row_and_run_again(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.begin_many(keys) as batch:
            for key in keys:
                with batch.connection.begin_nested() as savepoint:
                    batch.connection.execute(effects.insert().values(name=key, pid=0))
                    if key == keys[2]:
                        savepoint.rollback()
            batch.release_many(keys[2:3])
            batch.complete_many(dict.fromkeys(batch.pending, "first"))
        assert shop.counted(keys) == [1, 1, 0, 1, 1]
        assert shop.database.rows(str(shop.idem.key_of(keys[2]))) == []

        assert shop.charge(keys, "second") == ["first", "first", "second", "first", "first"]
        assert shop.counted(keys) == [1] * 5

    def test_a_batch_without_completed_keys_is_rolled_back(
        self, shop: Shop, keys: list[str]
    ) -> None:
        with shop.idem.begin_many(keys) as batch:
            shop.write(batch)
            batch.release_many()
            with pytest.raises(TransactionError, match="no open transaction"):
                _ = batch.connection
        assert shop.counted(keys) == [0] * 5
        shop.charge(keys)

    def test_all_keys_are_to_be_completed_or_released(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.begin_many(keys) as batch:
            shop.write(batch)
            with pytest.raises(IdempotencyError, match="4 of its keys are pending"):
                batch.complete_many({keys[0]: 1})
        assert shop.counted(keys) == [0] * 5


class TestFailures:
    def test_a_body_that_raises(self, shop: Shop, keys: list[str]) -> None:
        def fail() -> None:
            with shop.idem.begin_many(keys) as batch:
                shop.write(batch)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert shop.counted(keys) == [0] * 5
        assert shop.charge(keys) == ["paid"] * 5

    def test_a_body_that_ends_its_transaction(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.begin_many(keys) as batch:
            batch.connection.rollback()
            with pytest.raises(TransactionError, match="savepoints"):
                batch.complete_many()
        assert shop.charge(keys) == ["paid"] * 5

    @pytest.mark.parametrize("committed", [True, False])
    def test_the_reply_to_the_commit_is_lost(
        self, shop: Shop, keys: list[str], monkeypatch: pytest.MonkeyPatch, committed: bool
    ) -> None:
        """The connection breaks just after, or just before, the server has processed it."""
        from celery_idempotent.sql.sqlalchemy import SQLAlchemySession

        commit = SQLAlchemySession.commit

        def breaks(session: SQLAlchemySession) -> None:
            monkeypatch.undo()
            if committed:
                commit(session)
            raise ConnectionError("lost")

        monkeypatch.setattr(SQLAlchemySession, "commit", breaks)
        if committed:
            assert shop.charge(keys, "first") == ["first"] * 5
        else:
            with pytest.raises(ConnectionError):
                shop.charge(keys, "first")
        forget_records(shop.idem)
        assert shop.charge(keys, "second") == ["first" if committed else "second"] * 5
        assert shop.counted(keys) == [1] * 5

    def test_another_batch_commits_after_a_lost_commit(
        self, shop: Shop, keys: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from celery_idempotent.sql.sqlalchemy import SQLAlchemySession

        def breaks(session: SQLAlchemySession) -> None:
            monkeypatch.undo()
            session.rollback()
            forget_records(shop.idem)
            contextvars.Context().run(shop.charge, keys, "another")
            raise ConnectionError("lost")

        monkeypatch.setattr(SQLAlchemySession, "commit", breaks)
        with pytest.raises(StoreUnavailableError, match="another execution has committed"):
            shop.charge(keys)
        assert shop.charge(keys) == ["another"] * 5
        assert shop.counted(keys) == [1] * 5

    def test_a_row_without_an_outcome_is_refused_alone(
        self, shop: Shop, database: TestDatabase, keys: list[str]
    ) -> None:
        prefix = shop.idem.executor.store.config.prefix
        with database.engine.begin() as connection:
            hold_row(connection, prefix, shop.idem.key_of(keys[1]))
        with shop.idem.begin_many(keys) as batch:
            assert isinstance(batch[1].error, TransactionError)
            shop.write(batch)
            assert batch.complete_many() == {}
        assert shop.counted(keys) == [1, 0, 1, 1, 1]

    def test_without_redis(self, database: TestDatabase, keys: list[str]) -> None:
        shop = Shop("redis://127.0.0.1:1/0", database, on_store_error="run")
        assert shop.charge(keys[:3], "first") == ["first"] * 3
        assert shop.charge(keys, "second") == ["first"] * 3 + ["second"] * 2
        assert shop.counted(keys) == [1] * 5

    def test_redis_is_lost_in_the_body(self, shop: Shop, keys: list[str]) -> None:
        with shop.idem.begin_many(keys) as batch:
            shop.write(batch)
            forget_records(shop.idem)
            assert batch.complete_many(dict.fromkeys(keys, "first")) == {}
        assert shop.charge(keys, "second") == ["first"] * 5
        assert shop.counted(keys) == [1] * 5

    def test_redis_is_unavailable_after_the_commit(
        self, shop: Shop, keys: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(_: Any) -> None:
            raise StoreUnavailableError("away")

        with shop.idem.begin_many(keys) as batch, monkeypatch.context() as patch:
            shop.write(batch)
            patch.setattr(shop.idem.executor.runtime, "execute_all", refuse)
            assert batch.complete_many(dict.fromkeys(keys, "first")) == {}
        forget_records(shop.idem)
        assert shop.charge(keys, "second") == ["first"] * 5
        assert shop.counted(keys) == [1] * 5

    def test_an_unavailable_database_frees_the_keys(
        self, server: RedisServer, shop: Shop, database: TestDatabase, keys: list[str]
    ) -> None:
        prefix = shop.idem.executor.store.config.prefix
        away = sa.create_engine("sqlite:////nowhere/shop.db")
        without = Shop(server.url, database, key_prefix=prefix, transaction=away)
        with pytest.raises(StoreUnavailableError, match="idempotency_transaction"):
            without.idem.begin_many(keys)
        assert shop.charge(keys) == ["paid"] * 5
        without.idem.close()

    def test_coroutines_are_refused(self, shop: Shop, keys: list[str]) -> None:
        with pytest.raises(SettingsError, match="abegin_many"):
            asyncio.run(shop.idem.abegin_many(keys))


async def die(*_: object) -> NoReturn:
    """Kills the process after the commit, before the records are completed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    # A batch in a process that the test kills.
    url, database_url, prefix, *names = sys.argv[1:]
    idem = Idempotency(url, key_prefix=prefix, lease=1, transaction=new_engine(database_url))
    flow._store = die
    with idem.begin_many(names) as batch:
        for name in batch.pending:
            batch.connection.execute(effects.insert().values(name=name, pid=os.getpid()))
        batch.complete_many(dict.fromkeys(names, f"receipt-{os.getpid()}"))
