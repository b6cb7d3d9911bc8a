"""The statements of a call: a claim and an outcome more than a plain transaction has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from celery_idempotent import Idempotency
from tests.servers.redis_server import RedisServer
from tests.sql.conftest import each_kind
from tests.sql.databases import TestDatabase, effects, new_engine


def count(engine: sa.Engine, work: Callable[[], Any]) -> dict[str, int]:
    """Returns how often each event has happened during `work`."""
    counts = {"statements": 0, "begin": 0, "commit": 0, "rollback": 0}

    def counter(name: str) -> Callable[..., None]:
        def listener(*_: Any) -> None:
            counts[name] += 1

        return listener

    events = {name: counter(name) for name in counts}
    for name, listener in events.items():
        sa.event.listen(engine, name.replace("statements", "before_cursor_execute"), listener)
    try:
        work()
    finally:
        for name, listener in events.items():
            sa.event.remove(engine, name.replace("statements", "before_cursor_execute"), listener)
    return counts


@each_kind
def test_two_statements_more(server: RedisServer, database: TestDatabase) -> None:
    engine = new_engine(database.url)
    idem = Idempotency(server.url, key_prefix=uuid4().hex)
    insert = effects.insert().values(name="one", pid=0)

    def plain() -> None:
        with engine.begin() as connection:
            connection.execute(insert)

    @idem.idempotent(transaction=engine)
    def charge(order: str) -> None:
        idem.current.connection.execute(insert)

    plain()  # connects
    expected = count(engine, plain)
    order = uuid4().hex
    run = count(engine, lambda: charge(order))
    replay = count(engine, lambda: charge(order))
    idem.close()
    engine.dispose()

    assert run == {**expected, "statements": expected["statements"] + 2}
    assert set(replay.values()) == {0}, "it is answered from Redis"
