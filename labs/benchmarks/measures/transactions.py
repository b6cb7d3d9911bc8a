"""The cost of an outcome in the user's own database."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from celery import Celery, Task

from celery_idempotent import IdempotentTask
from celery_idempotent.contrib.sqlalchemy import metadata
from labs.benchmarks.bench import private_server
from labs.benchmarks.environments import CONTROL
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Rounds
from labs.benchmarks.measure import Measure, MissingDependency, ProgressCallback
from labs.benchmarks.traced_calls import REPLAYED, TracedCalls, interleave_calls
from tests.servers.sql_server import PostgreSQL, find_postgres
from tests.sql.databases import effects, new_engine

PLAIN = "celery"
BY_HAND = "unique column and get_or_create"
WITHOUT = "celery-idempotent without transaction"
OURS = "celery-idempotent with transaction"
REPLAY = f"{OURS}, replay"
COMPARED = (CONTROL, BY_HAND, WITHOUT, OURS, REPLAY)

charges = sa.Table(
    "charges",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(64), unique=True),
    sa.Column("result", sa.String(64)),
)


class Transactions(Measure):
    """A task that inserts one row, inside a process of the pool, with SQLAlchemy.

    Plain Celery's body is one transaction. By hand, it first reads a row by its unique key, and
    also inserts that row if there is none. celery-idempotent claims a row and writes the outcome
    into it. PostgreSQL and SQLite (WAL) keep their defaults: each commit is on disk.
    """

    name = "sql"
    title = "outcomes in the database"

    ROUNDS, EACH = 30, 20

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        counted: list[Figure] = []
        figures: list[Figure] = []
        raw = {}
        with private_server() as server, _databases() as databases:
            for number, (kind, url) in enumerate(databases.items()):
                with _engine(url) as engine:
                    calls = _calls(server.url, engine)
                    times = interleave_calls(
                        calls, self.ROUNDS, self.EACH,
                        lambda share, before=number: progress((before + share) / len(databases)),
                    )  # fmt: skip
                    statements = {name: _statements(engine, each) for name, each in calls.items()}
                raw[kind] = times
                counted += _counted(kind, statements)
                figures += _ratios(kind, times)
        return MeasureResult([*counted, *figures], raw={"medians of rounds, µs": raw})


@contextmanager
def _databases() -> Iterator[dict[str, str]]:
    """Yields the URL of a new database of each kind."""
    if find_postgres() is None:
        raise MissingDependency("PostgreSQL is not installed: apt-get install postgresql")
    with PostgreSQL.start() as server, tempfile.TemporaryDirectory() as directory:
        yield {
            "PostgreSQL": server.create_database(),
            "SQLite": f"sqlite:///{directory}/bench.db",
        }


@contextmanager
def _engine(url: str) -> Iterator[sa.Engine]:
    engine = new_engine(url)
    for tables in (metadata, effects.metadata, charges.metadata):
        tables.create_all(engine)
    yield engine
    engine.dispose()


def _calls(url: str, engine: sa.Engine) -> dict[str, TracedCalls]:
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    app.conf.idempotency_key_prefix = uuid4().hex

    def insert(connection: sa.Connection, order: str) -> None:
        connection.execute(effects.insert().values(name=order, pid=0))

    def plain(order: str) -> None:
        with engine.begin() as connection:
            insert(connection, order)

    def by_hand(order: str) -> str:
        with engine.begin() as connection:
            query = sa.select(charges.c.result).where(charges.c.key == order)
            if found := connection.execute(query).first():
                return found[0]
            connection.execute(charges.insert().values(key=order, result="done"))
            insert(connection, order)
            return "done"

    def transactional(self: Any, order: str) -> None:
        insert(self.idempotency.connection, order)

    def calls_of(
        name: str, body: Callable[..., Any], order: str = "", **options: Any
    ) -> TracedCalls:
        task = app.task(name=f"sql.{name}", shared=False, acks_late=True, **options)(body)
        return TracedCalls(app, app.tasks[task.name], order)

    with_transaction = {"base": IdempotentTask, "bind": True, "idempotency_transaction": engine}
    return {
        PLAIN: calls_of("plain", plain, base=Task),
        CONTROL: calls_of("again", plain, base=Task),
        BY_HAND: calls_of("by_hand", by_hand, base=Task),
        WITHOUT: calls_of("without", plain, base=IdempotentTask),
        OURS: calls_of("transactional", transactional, **with_transaction),
        REPLAY: calls_of("replayed", transactional, REPLAYED, **with_transaction),
    }


def _statements(engine: sa.Engine, calls: TracedCalls) -> int:
    """Returns the statements of one call, without begin and commit."""
    count = 0

    def listener(*_: object) -> None:
        nonlocal count
        count += 1

    calls.publish(1)
    sa.event.listen(engine, "before_cursor_execute", listener)
    calls.call()
    sa.event.remove(engine, "before_cursor_execute", listener)
    return count


def _counted(kind: str, statements: dict[str, int]) -> Iterator[Figure]:
    more = statements[OURS] - statements[PLAIN]
    yield Figure(f"{kind}: statements, {OURS} − {PLAIN}", more, goal=Goal(2))
    for name, number in statements.items():
        if name != CONTROL:
            yield Figure(f"{kind}: statements, {name}", number)


def _ratios(kind: str, times: Rounds) -> Iterator[Figure]:
    for name in COMPARED:
        spread = Spread.from_ratios(times[name], times[PLAIN])
        yield Figure.from_spread(f"{kind}: {name} / {PLAIN}", spread, "×")
    spread = Spread.from_ratios(times[OURS], times[BY_HAND])
    yield Figure.from_spread(f"{kind}: {OURS} / {BY_HAND}", spread, "×")
    yield Figure.from_spread(f"{kind}: {PLAIN}", Spread.from_values(times[PLAIN]), "µs")
