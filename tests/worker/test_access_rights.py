"""A user with the rights of docs/redis-configuration.md, on each kind of server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from redis.exceptions import NoPermissionError

from celery_idempotent.core.store.tracking import CHANNEL
from celery_idempotent.dashboard import asgi
from tests.apps import close, run_command
from tests.dashboard.conftest import serving
from tests.servers.groups import ClusterServers
from tests.servers.redis_server import RedisServer
from tests.store.deployments import CLUSTER_RULES, KINDS, OPERATORS, RECORDS, RESULTS
from tests.waiting import SOON, eventually
from tests.worker.canvas_tasks import PARTS, ship
from tests.worker.harness import Shop
from tests.worker.shop import make_app
from tests.worker.tasks import OutOfStockError, charge, final, reserved, waiting

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        # Redis 7.0 refuses rules that it does not know, which 6.2 does not.
        kind if kind == "redis-server" else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in (*KINDS, "cluster")
    ],
)
def limited(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """A shop whose results and records are in the server, or its records in the cluster."""
    is_cluster = request.param == "cluster"
    kind, further = ("any", CLUSTER_RULES) if is_cluster else (request.param, RESULTS)
    users = {"shop": f"{RECORDS} {further}", "operator": f"{RECORDS} {further} {OPERATORS}"}
    setting = "idempotency_redis_url" if is_cluster else "result_backend"
    with ExitStack() as stack:
        config = {"databases": "200"}
        server = stack.enter_context(RedisServer.start(kind, users=users, config=config))
        behind: RedisServer | ClusterServers = server
        if is_cluster:
            behind = stack.enter_context(ClusterServers.start(users=users))
        urls = {user: {setting: behind.url_as(user, "password")} for user in users}
        directory = tmp_path_factory.mktemp("shop")
        shop = stack.enter_context(Shop(server, directory, **urls["shop"]))
        operator = make_app({**shop.settings, **urls["operator"]})
        stack.callback(close, operator)
        shop.start_worker(concurrency=2)
        nodes = behind.nodes if isinstance(behind, ClusterServers) else (server,)
        yield Limited(shop, operator, nodes)


class Limited(NamedTuple):
    shop: Shop
    #: The app of the command line and the dashboard, with another user than the worker.
    operator: Celery
    nodes: Sequence[RedisServer]


@pytest.fixture
def shop(limited: Limited) -> Iterator[Shop]:
    """The shop. Afterwards the servers have refused nothing but what doctor and redis-py try."""
    limited.shop.app.set_current()
    with ExitStack() as stack:
        admins = [stack.enter_context(node.client()) for node in limited.nodes]
        for admin in admins:
            admin.acl_log_reset()
        yield limited.shop
        limited.shop.wait_until_empty()
        refused = {entry["object"] for admin in admins for entry in admin.acl_log()}
    # As Redis 7 and 6.2 name them.
    assert refused <= {"client|setinfo", "client", "config|get", "config"}


def test_calls_duplicates_errors_and_steps(shop: Shop, order: str) -> None:
    ship.delay(order).get(timeout=SOON)
    assert shop.ledger.notes(order) == list(PARTS)
    value = charge.delay(order).get(timeout=SOON)
    assert charge.delay(order).get(timeout=SOON) == value
    for _ in range(2):
        with pytest.raises(OutOfStockError):
            final.delay(order).get(timeout=SOON)
    assert charge.idempotency_record(order).result == value
    assert charge.idempotency_forget(order)


def test_a_duplicate_is_notified_of_the_end(shop: Shop, limited: Limited, order: str) -> None:
    first = shop.ledger.start(waiting, order)
    second = waiting.delay(order)
    clients = [node.client() for node in limited.nodes]
    eventually(lambda: any(client.pubsub_numsub(CHANNEL)[0][1] for client in clients), "it waits")
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


def test_the_command_line(shop: Shop, limited: Limited, order: str) -> None:
    charge.delay(order).get(timeout=SOON)
    key, failed = (str(task.idempotency_key_of(order)) for task in (charge, final))
    with pytest.raises(OutOfStockError):
        final.delay(order).get(timeout=SOON)

    run = partial(run_command, limited.operator)
    assert key in run("list", "--json")
    assert key in run("show", key)
    run("stats", "--timeout", "0")
    report = run("doctor", "--fail-on", "never")
    assert "does not report its" not in report
    assert "does not report maxmemory" not in report
    run("rerun", failed, "--yes")
    run("forget", key, "--yes")


@pytest.mark.parametrize("path", ["", "records", "records/{key}", "doctor", "workers", "explain"])
def test_the_dashboard(shop: Shop, limited: Limited, order: str, path: str) -> None:
    charge.delay(order).get(timeout=SOON)
    key = quote(str(charge.idempotency_key_of(order)), safe="")

    with serving(asgi(limited.operator, auth="u:p")) as url:
        response = httpx.get(f"{url}/{path.format(key=key)}", auth=("u", "p"), timeout=SOON)
    assert response.status_code == 200, response.text


def test_the_administrators_password_stays_secret(limited: Limited) -> None:
    client = limited.operator.tasks[charge.name].idempotency_configuration.executor.store.client
    with pytest.raises(NoPermissionError):
        client.config_get("requirepass")
