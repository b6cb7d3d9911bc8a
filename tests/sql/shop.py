"""The Celery app of the workers under test: its tasks write effects into a database.

The environment has the URL of Redis, the URL of the database, the library that accesses it, and a
directory of breakpoints: a process that reaches a point whose file exists there removes the file,
and kills itself.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery, current_task
from celery.signals import after_task_publish, worker_init

from celery_idempotent import TASK_ID, IdempotentTask, signals
from tests.servers.program import die_with_parent
from tests.sql.databases import effects, new_engine, set_up_django
from tests.waiting import eventually

#: Where a process can be killed, in the order of a call.
POINTS = (
    *("record begun", "transaction begun", "row claimed", "effect written"),
    *("body returned", "outcome written", "committed", "record completed"),
)

BREAKPOINTS = Path(os.environ.get("SHOP_BREAKPOINTS", "/nonexistent"))
DATABASE = os.environ.get("SHOP_DATABASE", "sqlite://")
LIBRARY = os.environ.get("SHOP_LIBRARY", "sqlalchemy")


def breakpoint_of(directory: Path, order: str, point: str) -> Path:
    """Returns the file that requests the death of the process that charges `order`, at `point`."""
    return directory / f"{order} {point}"


def starts_of(directory: Path, order: str) -> Path:
    """Returns the file that has a line for each execution of the order."""
    return directory / f"{order} starts"


def reach(point: str) -> None:
    """Kills this process if the test has requested it for the current order at `point`."""
    if not point or not current_task:
        return
    try:
        breakpoint_of(BREAKPOINTS, current_task.request.args[0], point).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _around(cls: Any, name: str, before: str, after: Callable[..., str]) -> None:
    """Adds breakpoints before and after a method."""
    method = getattr(cls, name)

    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        reach(before)
        value = method(self, *args, **options)
        reach(after(*args))
        return value

    setattr(cls, name, wrapper)


def _after_statement(statement: str, _: Any) -> str:
    if statement.startswith("INSERT"):
        return "row claimed"
    return "outcome written" if "finished_at = NULL" not in statement else "row claimed"


if LIBRARY == "django":
    set_up_django(DATABASE)
    from celery_idempotent.sql.django import DjangoSession

    Session: Any = DjangoSession
    database: Any = "default"
else:
    from celery_idempotent.sql.sqlalchemy import SQLAlchemySession

    Session = SQLAlchemySession
    database = new_engine(DATABASE)

app = Celery("sql_shop", broker=os.environ.get("SHOP_REDIS"), backend=os.environ.get("SHOP_REDIS"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    worker_hijack_root_logger=False,
    idempotency_transaction=database,
    idempotency_lease=float(os.environ.get("SHOP_LEASE", "20")),
    **json.loads(os.environ.get("SHOP_SETTINGS", "{}")),
)


if "SHOP_BREAKPOINTS" in os.environ:
    _around(Session, "begin", "record begun", lambda: "transaction begun")
    _around(Session, "execute", "", _after_statement)
    _around(Session, "commit", "", lambda: "committed")
    if LIBRARY == "django":
        from django.db.backends.base.base import BaseDatabaseWrapper

        _around(BaseDatabaseWrapper, "run_and_clear_commit_hooks", "before on_commit", lambda: "")

    @after_task_publish.connect
    def _published(**_: Any) -> None:
        reach("published")

    @signals.completed.connect
    def _record_completed(**_: Any) -> None:
        reach("record completed")


worker_init.connect(die_with_parent)


def write_effect(connection: Any, name: str) -> None:
    """Writes an effect on the connection of the transaction."""
    if LIBRARY == "django":
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO effects (name, pid) VALUES (%s, %s)", [name, os.getpid()])
    else:
        connection.execute(effects.insert().values(name=name, pid=os.getpid()))


def touch(connection: Any, name: str) -> None:
    """Locks the effects of that name."""
    if LIBRARY == "django":
        with connection.cursor() as cursor:
            cursor.execute("UPDATE effects SET pid = %s WHERE name = %s", [os.getpid(), name])
    else:
        connection.execute(effects.update().where(effects.c.name == name).values(pid=os.getpid()))


class Declined(Exception):
    """Ends the key."""


def task(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Registers a bound idempotent task of this app; its key is the order."""
    if func is None:
        return partial(task, **options)
    defaults = {"name": f"sql_shop.{func.__name__}", "idempotency_key": "order:{order}"}
    return app.task(bind=True, shared=False, base=IdempotentTask, **{**defaults, **options})(func)


@task(idempotency_key=None)
def transfer(self: Any, source: str, target: str) -> str:
    """Updates two rows; two transfers in opposite directions deadlock at their first attempt."""
    connection = self.idempotency.connection
    touch(connection, source)
    with starts_of(BREAKPOINTS, source).open("a") as starts:
        starts.write("started\n")
    eventually(starts_of(BREAKPOINTS, target).exists, "the other transfer has its first row")
    touch(connection, target)
    write_effect(connection, f"{source[:8]}-{target[:8]}")
    return "transferred"


def _charge(self: Any, order: str, end: str = "return") -> str:
    """Writes one effect, and returns a receipt of its own; it waits while its order is held."""
    with starts_of(BREAKPOINTS, order).open("a") as starts:
        starts.write("started\n")
    write_effect(self.idempotency.connection, order)
    reach("effect written")
    eventually(lambda: not breakpoint_of(BREAKPOINTS, order, "held").exists(), "it is released")
    receipt = uuid4().hex
    if end == "decline":
        raise Declined(receipt)
    reach("body returned")
    return receipt


charge = task(_charge, name="sql_shop.charge", idempotency_replay_errors=(Declined,))
#: The key is poisoned if its process dies once.
charge_with_one_try = task(_charge, name="sql_shop.charge_with_one_try", idempotency_max_attempts=1)


@task
def charge_in_parts(self: Any, order: str, left: int) -> str:
    """Writes an effect, and replaces itself until no part is left."""
    write_effect(self.idempotency.connection, order)
    if left:
        self.replace(charge_in_parts.s(order, left - 1))
    return uuid4().hex


@task(idempotency_key=TASK_ID)
def notify(self: Any, note: str) -> None:
    """Writes one effect for each message."""
    write_effect(self.idempotency.connection, note)


@task
def charge_and_notify(self: Any, order: str, note: str) -> str:
    """Writes an effect, and publishes on commit, as Celery's ``delay_on_commit`` does."""
    from django.db import transaction

    write_effect(self.idempotency.connection, order)
    transaction.on_commit(partial(notify.delay, note))
    return uuid4().hex


def _runs_again(until: str) -> Any:
    @task(name=f"sql_shop.until_{until}", idempotency_until=until)
    def run_again(self: Any, order: str) -> str:
        """Writes one effect for each message."""
        write_effect(self.idempotency.connection, order)
        return uuid4().hex

    return run_again


until_finished, until_started = map(_runs_again, ("finished", "started"))
