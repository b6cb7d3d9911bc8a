"""A user with the rights of docs/redis-configuration.md, on each kind of server."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import urlsplit

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult

from celery_idempotent.store.tracking import CHANNEL
from tests.apps import run_command
from tests.servers.redis_server import RedisServer
from tests.store.deployments import KINDS, documented_rules
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.harness import Shop
from tests.worker.tasks import OutOfStockError, charge, final, reserved, waiting

pytestmark = [pytest.mark.worker, pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[
        # Redis 7.0 refuses rules that it does not know, which 6.2 does not.
        kind if kind == "redis-server" else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in KINDS
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer.start(request.param, config={"databases": "200"}) as server:
        yield server


@pytest.fixture(scope="module")
def limited(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop whose results and records are in the server, for the documented user."""
    records, results, command_line = documented_rules("docs/redis-configuration.md")
    with server.client() as admin:
        for rules in (records, results, command_line):
            admin.execute_command("ACL", "SETUSER", "idempotency", *rules.split())
    address = urlsplit(server.url)
    url = address._replace(netloc=f"idempotency:password@{address.netloc}").geturl()
    with Shop(server, tmp_path_factory.mktemp("shop"), result_backend=url) as shop:
        shop.start_worker(concurrency=2)
        yield shop


@pytest.fixture
def shop(server: RedisServer, limited: Shop) -> Iterator[Shop]:
    """The shop. Afterwards the server has refused nothing but the name of redis-py."""
    limited.app.set_current()
    with server.client() as admin:
        admin.acl_log_reset()
        yield limited
        limited.wait_until_empty()
        refused = {entry["object"] for entry in admin.acl_log()}
    assert refused <= {"client|setinfo", "client"}  # as Redis 6.2 names it


def test_calls_duplicates_and_errors(shop: Shop, order: str) -> None:
    value = charge.delay(order).get(timeout=SOON)
    assert charge.delay(order).get(timeout=SOON) == value
    for _ in range(2):
        with pytest.raises(OutOfStockError):
            final.delay(order).get(timeout=SOON)
    assert charge.idempotency_record(order).result == value
    assert charge.idempotency_forget(order)


def test_steps(shop: Shop, order: str) -> None:
    ship.delay(order).get(timeout=SOON)

    assert shop.ledger.notes(order) == list(PARTS)


def test_a_duplicate_is_notified_of_the_end(shop: Shop, order: str) -> None:
    first = shop.ledger.start(waiting, order)
    second = waiting.delay(order)
    eventually(
        lambda: shop.redis.pubsub_numsub(CHANNEL)[0][1], "the duplicate waits for a notification"
    )
    shop.ledger.release(order)

    assert second.get(timeout=SOON) == first.get(timeout=SOON)


def test_publishers_wait_for_results(shop: Shop, order: str) -> None:
    shop.ledger.hold(order)
    results = [reserved.delay(order), reserved.delay(order)]
    waiters = [AsyncResult(result.id, app=shop.app) for result in results]
    with pytest.raises(CeleryTimeoutError):
        waiters[0].get(timeout=0.1)
    shop.ledger.release(order)

    assert results[0].get(timeout=SOON) == waiters[1].get(timeout=SOON)
    waiters[0].forget()


def test_the_command_line(shop: Shop, order: str) -> None:
    charge.delay(order).get(timeout=SOON)

    run, key = partial(run_command, shop.app), str(charge.idempotency_key_of(order))
    assert key in run("list", "--json")
    assert key in run("show", key)
    run("stats", "--timeout", "0")
    assert "does not report" not in run("doctor", "--timeout", "0", "--fail-on", "never")
    run("forget", key, "--yes")
