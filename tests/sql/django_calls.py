"""Calls in a Django process; prints what has become of each as JSON.

python -m tests.sql.django_calls DATABASE_URL REDIS_URL
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery_idempotent import Idempotency
from tests.sql import django_process
from tests.sql.databases import set_up_django
from tests.sql.django_process import effects, insert
from tests.sql.processes import dump_cases

set_up_django(sys.argv[1])

from django.core.management import call_command  # noqa: E402 - Django has to be set up
from django.db import OperationalError, connection, connections, router, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import RequestFactory  # noqa: E402
from django.test.utils import CaptureQueriesContext  # noqa: E402

from celery_idempotent.contrib.django.models import Outcome  # noqa: E402

idem = Idempotency(sys.argv[2], key_prefix=uuid4().hex, transaction="default")


class Call(django_process.Call):
    """Of an error it returns the name alone."""

    def __init__(self, during: Callable[[str], Any] = lambda name: None) -> None:
        super().__init__(idem, during)

    def __call__(self) -> Any:
        outcome = super().__call__()
        return outcome.partition(":")[0] if isinstance(outcome, str) else outcome


def inside_atomic() -> list[Any]:
    call = Call()
    with transaction.atomic():
        outcome = call()
    return [outcome, *call.result()]


def under_atomic_requests() -> list[Any]:
    call = Call()

    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(call())

    settings = connection.settings_dict
    settings["ATOMIC_REQUESTS"] = True
    from django.core.handlers.base import BaseHandler

    response = BaseHandler().make_view_atomic(view)(RequestFactory().get("/"))
    settings["ATOMIC_REQUESTS"] = False
    return [response.content.decode(), call.runs, effects(call.name)]


class ReadsFromReplica:
    """A database router."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"


def reads_from_a_replica() -> list[Any]:
    """The replica is unavailable, so that whatever is read from it fails."""
    connections.databases["replica"] = {
        **connection.settings_dict,
        "NAME": "/nonexistent/replica.db",
        "PORT": "1",
    }
    routers, router.routers = router.routers, [ReadsFromReplica()]
    call = Call()
    try:
        read = "read"
        try:
            Outcome.objects.first()
        except OperationalError as error:
            read = type(error).__name__
        first = call()
        idem.executor.store.client.flushdb()
        return [read, [first, call(), call.runs, effects(call.name)]]
    finally:
        router.routers = routers
        del connections.databases["replica"]


def nested_atomic() -> list[Any]:
    def during(name: str) -> None:
        with transaction.atomic():
            insert(name)
            transaction.set_rollback(True)
        with transaction.atomic():
            insert(name)

    return Call(during).result()


def set_rollback() -> list[Any]:
    return Call(lambda name: transaction.set_rollback(True)).result()


def statements() -> int:
    """Returns how many more statements there are than in a plain transaction."""
    with CaptureQueriesContext(connection) as plain, transaction.atomic():
        insert("plain")
    with CaptureQueriesContext(connection) as ours:
        Call()()
    return len(ours) - len(plain)


def missing_migrations() -> str:
    try:
        call_command("makemigrations", "celery_idempotent", check=True, dry_run=True, verbosity=0)
    except SystemExit:
        return "the models differ from the migrations"
    return ""


def connection_in_body() -> bool:
    return Call(lambda name: idem.current.connection is connection).result() == [1, 1, 1, 1]


def batch() -> list[Any]:
    """Releases its second key; then all of it again."""
    keys = [uuid4().hex for _ in range(3)]
    decisions = []
    for _ in range(2):
        with idem.begin_many(keys) as batch:
            decisions.append([entry.decision.name for entry in batch])
            for key in batch.pending:
                with transaction.atomic():
                    insert(key)
                    transaction.set_rollback(key == keys[1] and len(batch.pending) == 3)
            if len(batch.pending) == 3:
                batch.release_many(keys[1:2])
            batch.complete_many()
        idem.executor.store.client.flushdb()
    try:
        with transaction.atomic():
            idem.begin_many([uuid4().hex])
    except Exception as error:
        decisions.append([type(error).__name__])
    return [*decisions, [effects(key) for key in keys]]


dump_cases(
    inside_atomic,
    under_atomic_requests,
    reads_from_a_replica,
    nested_atomic,
    set_rollback,
    statements,
    missing_migrations,
    connection_in_body,
    batch,
)
