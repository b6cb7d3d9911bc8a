"""The master dies, and the sentinels name another: what was begun is completed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.record.record import State
from celery_idempotent.store import scripts
from celery_idempotent.testing.process import wait_until
from tests.servers.sentinel import SentinelTrio
from tests.store import deployments as sites
from tests.store.deployments import Site
from tests.store.record_harness import OWNER, SECOND, Scene, store_at
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("site", sites.params(sites.SENTINEL), indirect=True)


@pytest.fixture
def trio(site: Site, connection: redis.Redis) -> Iterator[SentinelTrio]:
    """Whole again after the test, whatever died in it."""
    assert isinstance(site.behind, SentinelTrio)
    yield site.behind
    site.behind.rejoin()
    connection.connection_pool.disconnect()  # from who was master


def test_the_heir_completes_what_the_dead_master_began(scene: Scene, trio: SentinelTrio) -> None:
    begun = scene.started()
    heir = trio.replica
    with heir.client() as client:
        client.script_flush()  # where a version lets replicas learn what their master runs

    trio.failover()

    with heir.client() as client:
        assert client.script_exists(scripts.load("complete").sha) == [False]
    assert scene.extend(begun.token).case == "ok"
    assert scene.complete(begun.token).case == "ok"
    assert scene.begin(task_id=SECOND).case == "finished"
    assert scene.record().attempt == 1


def test_a_store_that_asks_all_the_while_gets_its_answer(scene: Scene, trio: SentinelTrio) -> None:
    token = scene.started().token
    wait_until(lambda: trio.replica.is_copy_of(trio.master), "the replica lags")
    trio.master.kill()
    with pytest.raises(StoreUnavailableError):
        scene.begin(task_id=SECOND)

    def completed() -> bool:
        try:
            return scene.complete(token).case == "ok"
        except StoreUnavailableError:
            return False

    eventually(completed, seconds=20)
    assert scene.record().state is State.COMPLETED


def test_a_connection_to_who_is_master_no_longer_leads_on(scene: Scene, trio: SentinelTrio) -> None:
    """A master that was frozen comes back, as a replica, with its connections still open."""
    token = scene.started().token
    old, heir = trio.master, trio.replica
    wait_until(lambda: heir.is_copy_of(old), "the replica lags")
    old.pause()
    try:
        wait_until(lambda: trio.master is heir, "no other master")
    finally:
        old.resume()
    with old.client() as thawed:
        thawed.replicaof("127.0.0.1", heir.port)  # as the sentinels would, in some seconds

    assert scene.complete(token).case == "ok"
    assert scene.begin(task_id=SECOND).case == "finished"
    with heir.client() as client:
        assert client.get(scene.name).startswith(b"C")


def test_a_begin_counts_when_the_replica_has_it(
    site: Site, client: Any, trio: SentinelTrio
) -> None:
    careful = Scene(store_at(**site.how, wait_replicas=1, wait_timeout=0.3), client)
    done = careful.completed()
    careful.forget()

    trio.replica.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas"):
            careful.begin(owner=OWNER)
    finally:
        trio.replica.resume()

    answer = careful.begin(owner=OWNER)
    assert (answer.case, answer.there.attempt) == ("begun", 1)
    assert answer.token > done.token
