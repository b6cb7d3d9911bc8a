"""The Django shop: a web process, a worker, and repeated requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import PostgreSQL
from tests.waiting import eventually

pytest.importorskip("django")
pytest.importorskip("celery.contrib.django.task", reason="delay_on_commit came with Celery 5.4")

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
CELERY = (sys.executable, "-m", "celery", "-q", "-A", "examples.django_shop.celery")

#: Runs in a process of its own, because Django can be set up only once in a process.
WEB = """
import json, sys, django
django.setup()
from django.core.management import call_command
from django.core import checks
from django.db import connection, transaction
from django.test import Client
from examples.django_shop.models import Order, Payment
from examples.django_shop.tasks import charge

def queue_length():
    with charge.app.connection() as connection:
        return connection.default_channel.client.llen("celery")

def lose_records():
    with charge.app.connection() as connection:
        client = connection.default_channel.client
        return client.delete(*client.keys("idem:*"))

def roll_back():
    with transaction.atomic():
        charge.delay_on_commit(42, 999)
        transaction.set_rollback(True)

for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Web:
    """The web process: evaluates expressions and replies with JSON."""

    def __init__(self, environment: dict[str, str]) -> None:
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", WEB]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **how)

    def __call__(self, expression: str) -> Any:
        print(expression, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of the shop's processes; the parameter is ``postgresql`` or, by default, ``sqlite``."""
    database = {"SHOP_DATABASE": str(tmp_path / "shop.sqlite3")}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    with ExitStack() as stack:
        if getattr(request, "param", "sqlite") == "postgresql":
            postgresql = stack.enter_context(PostgreSQL.start())
            postgresql.execute("CREATE DATABASE shop")
            port, user = str(postgresql.port), "postgres"
            database = {"PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": user}
        server = stack.enter_context(RedisServer.start(config={"appendonly": "yes"}))
        settings = {"DJANGO_SETTINGS_MODULE": "examples.django_shop.settings"}
        settings |= {"DJANGO_ALLOW_ASYNC_UNSAFE": "1", "SHOP_REDIS": server.url}
        yield inherited | database | settings


@pytest.fixture
def web(environment: dict[str, str]) -> Iterator[Web]:
    web = Web(environment)
    try:
        web("call_command('migrate', run_syncdb=True, verbosity=0)")
        web("[Order.objects.create(pk=42, amount=999).pk]")
        yield web
    finally:
        web.stop()


@pytest.fixture
def start_worker(environment: dict[str, str]) -> Iterator[Callable[[], None]]:
    workers = []

    def start() -> None:
        command = [*CELERY, "worker", "--pool", "solo"]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment))

    yield start
    for worker in workers:
        worker.terminate()
        worker.wait(20)


DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)]
PAY = "(lambda r: [r.status_code, r.json()])(Client().post('/orders/42/pay'))"


def pay_until_completed(web: Web) -> None:
    eventually(lambda: web(PAY)[1]["charge"] == "COMPLETED", "the order is charged")


@pytest.mark.worker
@pytest.mark.parametrize("environment", DATABASES, indirect=True)
def test_an_order_is_charged_once_for_all_requests(
    environment: dict[str, str], web: Web, start_worker: Callable[[], None]
) -> None:
    assert web("connection.vendor") == ("postgresql" if "PGHOST" in environment else "sqlite")
    replies = [web(PAY) for _ in range(3)]

    assert replies == [[202, {"order": 42, "charge": "RESERVED"}]] * 3
    assert web("queue_length()") == 1
    start_worker()
    pay_until_completed(web)
    assert web("list(Payment.objects.values_list('order_id', 'amount'))") == [[42, 999]]
    assert web("Order.objects.get(pk=42).state") == "paid"
    assert web("charge.idempotency_record(42, 999).result['amount']") == 999

    assert web("lose_records()") >= 1
    assert web("charge.idempotency_record(42, 999)") is None
    pay_until_completed(web)
    assert web("Payment.objects.count()") == 1


def test_a_rollback_publishes_and_reserves_nothing(web: Web) -> None:
    web("roll_back()")

    assert web("queue_length()") == 0
    assert web("charge.idempotency_record(42, 999)") is None


def test_the_system_checks_find_nothing(web: Web) -> None:
    assert web("[str(each) for each in checks.run_checks(databases=['default'])]") == []


def test_the_command_line_shows_the_record(environment: dict[str, str], web: Web) -> None:
    web(PAY)
    call = ("examples.django_shop.tasks.charge", "[42, 999]")
    command = [*CELERY, "idempotency", "show", *call, "--json"]
    shown = json.loads(subprocess.check_output(command, cwd=ROOT, env=environment))

    assert shown["state"] == "RESERVED"
