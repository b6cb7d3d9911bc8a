"""Sentinels promote a replica: an execution completes at the new master."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_idempotent.core.record import State
from celery_idempotent.errors import StoreUnavailableError
from tests.servers.groups import SentinelServers
from tests.servers.program import wait_until
from tests.store import deployments
from tests.store.deployments import Site
from tests.store.record_harness import SECOND, Harness
from tests.waiting import eventually

pytestmark = [pytest.mark.exhaustive, deployments.on(deployments.SENTINEL)]


@pytest.fixture
def trio(site: Site, connection: redis.Redis) -> Iterator[SentinelServers]:
    """Servers that are repaired after the test."""
    assert isinstance(site.behind, SentinelServers)
    yield site.behind
    site.behind.rejoin()
    connection.connection_pool.disconnect()  # to the old master


def test_a_store_in_use_recovers_from_a_failover(harness: Harness, trio: SentinelServers) -> None:
    token = harness.started().token
    wait_until(lambda: trio.replica.is_copy_of(trio.master), "the replica lags")
    trio.master.kill()
    with pytest.raises(StoreUnavailableError):
        harness.begin(task_id=SECOND)

    def completed() -> bool:
        try:
            return harness.complete(token).case == "ok"
        except StoreUnavailableError:
            return False

    eventually(completed, seconds=20)
    assert harness.record().state is State.COMPLETED


def test_a_connection_to_an_old_master_is_replaced(harness: Harness, trio: SentinelServers) -> None:
    """A frozen master resumes as a replica, with its connections still open."""
    token = harness.started().token
    old, successor = trio.master, trio.replica
    wait_until(lambda: successor.is_copy_of(old), "the replica lags")
    old.pause()
    try:
        wait_until(lambda: trio.master is successor, "no other master")
    finally:
        old.resume()
    with old.client() as resumed:
        resumed.replicaof("127.0.0.1", successor.port)  # as the Sentinels do after some seconds

    assert harness.complete(token).case == "ok"
    assert harness.begin(task_id=SECOND).case == "finished"
    with successor.client() as client:
        assert client.get(harness.name).startswith(b"V")
