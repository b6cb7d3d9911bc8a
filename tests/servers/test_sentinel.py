"""Tests of the private Sentinel group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from redis.sentinel import Sentinel

from tests.servers.program import is_running
from tests.servers.sentinel import SentinelServers

pytestmark = pytest.mark.exhaustive  # the store's tests run on it, too


@pytest.fixture(scope="module")
def trio() -> Iterator[SentinelServers]:
    with SentinelServers.start(password="s3cret/@:") as trio:
        yield trio
        pids = pids_of(trio)
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    trio.stop()


def pids_of(trio: SentinelServers) -> list[int]:
    servers = (*trio.nodes, *trio.sentinels)
    return [server.client().info("server")["process_id"] for server in servers]


def test_listens_on_loopback_only(trio: SentinelServers) -> None:
    assert {node.client().config_get("bind")["bind"] for node in trio.nodes} == {"127.0.0.1"}
    addresses = [("127.0.0.1", sentinel.port) for sentinel in trio.sentinels]
    assert Sentinel(addresses).discover_master("shop") == ("127.0.0.1", trio.master.port)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # by Celery
def test_the_url_works_as_celerys_backend_and_broker(trio: SentinelServers) -> None:
    options = {"master_name": trio.master_name}
    app = Celery("shop", backend=trio.url, set_as_current=False)
    app.conf.result_backend_transport_options = options
    app.backend.store_result("a task", "charged", "SUCCESS")
    assert trio.client().get(app.backend.get_key_for_task("a task"))
    app.close()

    with Celery(broker=trio.url, set_as_current=False).connection(
        transport_options=options
    ) as connection:
        connection.ensure_connection(max_retries=1)


@pytest.mark.exhaustive
def test_the_replica_is_promoted_with_all_data_and_the_killed_master_rejoins(
    trio: SentinelServers,
) -> None:
    client = trio.client()
    client.set("key", "first")
    master, replica = trio.master, trio.replica

    assert trio.failover() is master
    assert trio.master is replica
    assert client.get("key") == b"first"
    with pytest.raises(redis.ConnectionError):
        master.client(retry=None).ping()

    client.set("key", "second")
    trio.rejoin()
    assert trio.replica is master
    assert master.client().get("key") == b"second"
