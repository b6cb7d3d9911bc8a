"""What operators see and forget of a key that has a row: with its record, and without."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery

from celery_idempotent import Idempotency, IdempotentTask, StoreUnavailableError, signals
from celery_idempotent.contrib.sqlalchemy import outcomes
from celery_idempotent.core.flow.forget import forget_call
from celery_idempotent.core.store import commands, run_sync
from tests.apps import close, run_command
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind_in_full
from tests.sql.databases import TestDatabase, effects
from tests.sql.test_purge import insert_rows
from tests.store.record_harness import Harness
from tests.waiting import SOON, eventually

pytestmark = each_kind_in_full

#: Columns of a row without an outcome.
CLAIMED: dict[str, Any] = {"state": "CLAIMED", "finished_at": None, "expires_at": None}


class Shop:
    """An app with a task that writes one effect for each run, and its command line."""

    def __init__(self, url: str, database: TestDatabase) -> None:
        self.app = Celery("shop", broker=url, backend=url, set_as_current=False)
        self.app.finalized = True  # without the shared tasks of other tests
        self.app.conf.task_always_eager = True
        self.database = database

        def charge(task: Any, order: str) -> str:
            insert = effects.insert().values(name=order, pid=0)
            task.idempotency.connection.execute(insert)
            return f"<b>receipt</b> {order}"

        options = {"bind": True, "base": IdempotentTask, "shared": False, "lazy": False}
        options |= {"idempotency_key": "{order}", "idempotency_transaction": database.engine}
        self.charge = self.app.task(charge, name="shop.charge", **options)
        configuration = self.charge.idempotency_configuration
        self.executor, self.rows = configuration.executor, configuration.settings.transaction
        self.prefix = self.executor.store.config.prefix

    def key(self, order: str) -> Any:
        return self.charge.idempotency_key_of(order)

    def forget_record(self, order: str) -> None:
        """Loses the record, as Redis does when it is flushed."""
        run_sync(self.executor.store.execute(commands.forget(self.key(order))))

    def celery(self, *arguments: str, code: int = 0) -> str:
        """Runs ``celery -A shop idempotency …``."""
        return run_command(self.app, *arguments, code=code)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.celery(*arguments, "--json"))

    def update_row(self, order: str, **values: Any) -> None:
        mine = outcomes.c.record_key == str(self.key(order))
        with self.database.engine.begin() as connection:
            connection.execute(outcomes.update().where(mine).values(values))


@pytest.fixture
def shop(server: RedisServer, database: TestDatabase) -> Iterator[Shop]:
    shop = Shop(server.url, database)
    yield shop
    close(shop.app)


def test_show_and_forget_have_the_row_beside_the_record(shop: Shop, order: str) -> None:
    shop.charge.apply((order,))

    shown = shop.json("show", str(shop.key(order)))

    assert shown["state"] == shown["sql_outcome"]["state"] == "COMPLETED"
    assert shown["token"] == shown["sql_outcome"]["token"]
    assert not shown["sql_outcome"]["expired"]
    assert "database" in shop.celery("show", "shop.charge", json.dumps([order]))

    shop.celery("forget", str(shop.key(order)), "--yes")

    assert shop.charge.idempotency_record(order) is None
    assert shop.database.rows(shop.key(order)) == []


def test_explain_predicts_by_the_row(shop: Shop, order: str) -> None:
    call = "shop.charge", json.dumps([order])

    explained = partial(shop.json, "explain", *call)
    assert (explained()["prediction"]["case"], "sql_outcome" in explained()) == ("run", False)
    shop.charge.apply((order,), task_id="first-id")
    harness = Harness(shop.executor.store, shop.executor.store.client, shop.key(order))
    for state in ("no record", "an expired lease"):
        shop.forget_record(order)
        if state != "no record":
            harness.silent(task_id="second-id")
        found = explained()
        assert found["prediction"]["case"] == "replay"
        sentence = found["prediction"]["sentence"]
        assert "replays the result of task first-id in the database " in sentence
        assert found["sql_outcome"]["task_id"] == "first-id"
    assert shop.charge.apply((order,)).get() == f"<b>receipt</b> {order}"
    for values, case in (
        ({"fingerprint": "00" * 8}, "reused"),
        (CLAIMED, "corrupt"),
        ({"state": "COMPLETED", "finished_at": 1, "expires_at": 1}, "run"),
    ):
        shop.forget_record(order)
        shop.update_row(order, **values)
        assert explained()["prediction"]["case"] == case


def test_a_row_without_a_record_is_shown_and_forgotten(shop: Shop, order: str) -> None:
    names: tuple[tuple[str, ...], ...] = (
        (str(shop.key(order)),),
        (f"{shop.prefix}:{shop.key(order)}",),
        ("shop.charge", json.dumps([order])),
    )
    forgotten: list[dict[str, Any]] = []

    def receive(**details: Any) -> None:
        forgotten.append(details)

    signals.forgotten.connect(receive)
    for runs, name in enumerate(names, 1):
        shop.charge.apply((order,))
        assert shop.database.effects(order) == runs
        shop.forget_record(order)

        shown = shop.json("show", *name)
        assert shown["state"] == "ABSENT"
        assert shown["result"] == f"<b>receipt</b> {order}"
        assert shown["sql_outcome"]["state"] == "COMPLETED"
        assert "ABSENT" in shop.celery("show", *name)

        assert "forgotten" in shop.celery("forget", *name, "--yes")
        assert "absent" in shop.celery("show", *name, code=1)
        assert shop.database.rows(shop.key(order)) == []
    signals.forgotten.disconnect(receive)

    assert [details["key"] for details in forgotten] == [str(shop.key(order))] * 3
    assert shop.charge.apply((order,)).get()
    assert shop.database.effects(order) == 4


def test_a_row_without_an_outcome_is_shown_and_forgotten(shop: Shop, order: str) -> None:
    """It was committed by a connection with autocommit, for example."""
    shop.charge.apply((order,))
    shop.forget_record(order)
    shop.update_row(order, **CLAIMED)

    shown = shop.json("show", str(shop.key(order)))
    assert "committed without an outcome" in shown["not_stored"]
    assert not shown["sql_outcome"]["expired"]

    shop.celery("forget", str(shop.key(order)), "--yes")
    assert shop.database.rows(shop.key(order)) == []


@pytest.mark.parametrize("changed", ["row", "row without a record", "record"])
def test_what_has_changed_is_kept(shop: Shop, order: str, changed: str) -> None:
    shop.charge.apply((order,))
    key, shown = shop.key(order), shop.charge.idempotency_record(order)
    forget, owner = partial(forget_call, shop.executor, key), "another owner"
    if changed == "row without a record":
        forget()
    if changed == "record":
        shop.charge.idempotency_forget(order)
        shop.charge.apply((order,))
        forget, owner = partial(forget, shown), ""

    assert shop.rows.forget(shop.prefix, key, forget, owner) == "changed"
    assert bool(shop.charge.idempotency_record(order)) is (changed != "row without a record")
    (row,) = shop.database.rows(key)
    assert row.state == "COMPLETED"


def test_without_redis_nothing_is_forgotten(shop: Shop, order: str) -> None:
    shop.charge.apply((order,))

    def unavailable() -> str:
        raise StoreUnavailableError("Redis")

    with pytest.raises(StoreUnavailableError):
        shop.rows.forget(shop.prefix, shop.key(order), unavailable)

    assert len(shop.database.rows(shop.key(order))) == 1


def test_a_call_meanwhile_waits_for_the_end_and_runs(shop: Shop, order: str) -> None:
    shop.charge.apply((order,))
    calling = threading.Thread(target=shop.charge.apply, args=((order,),))

    def forget_record() -> str:
        shop.forget_record(order)
        calling.start()
        eventually(lambda: shop.charge.idempotency_record(order), "the call has begun")
        return "ok"

    assert shop.rows.forget(shop.prefix, shop.key(order), forget_record) == "ok"
    calling.join(SOON)

    assert shop.database.effects(order) == 2
    assert len(shop.database.rows(shop.key(order))) == 1


def test_the_row_of_a_function_is_forgotten_in_the_database_that_is_named(
    shop: Shop, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sql.shop.database", shop.database.engine)
    idem = Idempotency(shop.app, transaction=shop.database.engine)
    run = idem.idempotent(key="{order}", name="run")(lambda order: uuid4().hex)
    receipt, name = run(order), ("--database", "tests.sql.shop:database")

    shop.celery("purge", *name)
    assert run(order) == receipt
    shop.celery("forget", str(run.idempotency_key_of(order)), "--yes", *name)
    assert run(order) != receipt


def test_rows_whose_messages_are_not_published_are_kept(shop: Shop, database: TestDatabase) -> None:
    insert_rows(database, 1, expires_at=1000, outbox=b"json\n[]")

    assert list(shop.json("purge")["deleted"].values()) == [0]
    with database.engine.begin() as connection:
        deleted = connection.execute(outcomes.delete().where(outcomes.c.outbox.is_not(None)))
        assert deleted.rowcount == 1


def test_health_finds_rows_that_should_be_deleted(shop: Shop, database: TestDatabase) -> None:
    def is_found() -> bool:
        return "purge-overdue" in shop.celery("health", "--fail-on", "never", "--timeout", "0")

    with database.engine.begin() as connection:
        connection.execute(outcomes.delete())
    yesterday = int((time.time() - 86400) * 1000)
    insert_rows(database, 3, expires_at=yesterday)
    assert not is_found()

    insert_rows(database, 3, expires_at=yesterday - 3 * 86_400_000)
    assert is_found()
    shop.celery("purge")
    assert not is_found()
