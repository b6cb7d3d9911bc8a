"""The app of the workers and of the publisher."""

from __future__ import annotations

import os
import time
from functools import cache, partial
from typing import Any

import sqlalchemy as sa
from celery import Celery, Task, chain
from django.conf import settings as django_settings
from django.db import connections
from django.db.transaction import atomic, on_commit

from celery_idempotent import IdempotentTask
from celery_idempotent.contrib.sqlalchemy import metadata
from labs.comparison.contestants import OURS, find_contestant
from labs.rig.worker import ledger_of, settings_of_worker
from tests.sql.databases import set_up_django

NAME = "labs.canvases.app"
LEASE = 4.0
#: Seconds for which a publisher that is killed reserves a key.
RESERVATION = 5.0

#: Written by the bodies that have a transaction.
rows = sa.Table("rows", sa.MetaData(), sa.Column("name", sa.String(64)))


class DeclinedError(Exception):
    """The order is declined."""


class BusyError(Exception):
    """The order can be tried again."""


@cache
def database(path: str) -> sa.Engine:
    """Returns the engine of the SQLite database at `path`, and creates its tables."""
    # A body locks the whole database. Without a pool, no connection outlives the file.
    engine = sa.create_engine(
        f"sqlite:///{path}", connect_args={"timeout": 30}, poolclass=sa.NullPool
    )
    with engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    metadata.create_all(engine)
    rows.metadata.create_all(engine)
    return engine


def make_app(settings: dict[str, Any], *, in_worker: bool = False) -> Celery:
    """Returns the app; ``contestant`` in `settings` is the library that protects its tasks.

    Workers with ``old`` do not know the task ``new``, as in a rolling deployment.
    """
    if not django_settings.configured:
        set_up_django("sqlite://")
    connections.databases["default"]["NAME"] = settings["django_database"]
    app = Celery("canvases", set_as_current=False)
    app.conf.update({
        "worker_prefetch_multiplier": 2,
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        # Without it, Celery stores the connection error as the result of a task that succeeded.
        "result_backend_always_retry": True,
        "idempotency_lease": LEASE,
        "idempotency_replay_errors": (DeclinedError,),
        **settings,
    })  # fmt: skip
    contestant = find_contestant(settings["contestant"])
    ours, ledger = contestant is OURS, ledger_of(settings)

    def note(name: str) -> None:
        ledger.write("effect", name=name, pid=os.getpid(), at=time.time())

    def work(order: str, seconds: float) -> str:
        time.sleep(seconds)
        note(order)
        return order

    def tail(before: Any, order: str) -> Any:
        note(order)
        return [before, order]

    def unprotected(before: Any, order: str) -> Any:
        note(order)
        return [before, order]

    def decline(order: str) -> None:
        note(order)
        raise DeclinedError(order)

    def apologise(order: str) -> None:
        note(order)

    def again(self: Any, order: str, throw: bool = True) -> str:
        if self.request.retries < 2:
            self.retry(countdown=0.3, throw=throw)
            return "later"
        note(order)
        return order

    def busy(self: Any, order: str) -> str:
        if self.request.retries < 2:
            raise BusyError
        note(order)
        return order

    def place(order: str, seconds: float) -> str:
        work.delay(f"{order}, ordered", seconds)
        note(order)
        return order

    def hand_over(self: Any, order: str, seconds: float) -> None:
        raise self.replace(inside(order, seconds))

    def book(self: Any, order: str, seconds: float, hands_over: bool = False) -> str:
        if not ours:
            with database(app.conf.database).begin() as connection:
                connection.execute(rows.insert(), {"name": order})
        else:
            self.idempotency.connection.execute(rows.insert(), {"name": order})
        time.sleep(seconds)
        if hands_over:
            raise self.replace(inside(order, seconds))
        return order

    def sell(order: str, seconds: float) -> str:
        with atomic(), connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO rows (name) VALUES (%s)", [order])
            time.sleep(seconds)
            on_commit(partial(work.delay, f"{order}, sold", seconds))
        return order

    def inside(order: str, seconds: float) -> Any:
        return chain(work.si(f"{order}, inside", seconds), tail.s(f"{order}, inside, tail"))

    def task(
        function: Any, name: str = "", *, base: type[Task] = IdempotentTask, **options: Any
    ) -> Any:
        options["name"] = f"canvases.{name or function.__name__}"
        options |= {"base": base if ours else Task, "shared": False}
        if in_worker and base is IdempotentTask:
            protect = contestant.worker_task(app, app.conf.broker_url, LEASE, **options)
            return protect(function)
        return app.task(function, **options)

    # The other libraries have nothing of the kind.
    task(tail, "watched", base=IdempotentTask if ours else Task, idempotency_shadow=True)
    task(work, "elsewhere", idempotency_redis_url=f"{app.conf.broker_url[:-1]}1")
    task(work, "reserved", idempotency_dedupe_publish=True)
    task(
        work,
        "reserved briefly",
        idempotency_dedupe_publish=True,
        idempotency_reservation_ttl=RESERVATION,
    )
    if not settings.get("old"):
        task(work, "new", idempotency_dedupe_publish=True)
    work, tail = task(work), task(tail)
    for function in (decline, apologise, place):
        task(function)
    for method in (again, hand_over):
        task(method, bind=True)
    task(busy, bind=True, autoretry_for=(BusyError,), default_retry_delay=0.3)
    task(book, bind=True, idempotency_transaction=database(app.conf.database))
    task(sell, idempotency_transaction="default")
    task(unprotected, base=Task)
    return app


if worker_settings := settings_of_worker():
    app = make_app(worker_settings, in_worker=True)
