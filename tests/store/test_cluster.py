"""Changes of a cluster: a master fails, a slot is migrated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from celery_idempotent.core.record import State
from celery_idempotent.core.store import commands, run_sync
from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.node import THRESHOLD
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import StoreUnavailableError
from tests.servers.groups import ClusterServers, SlotMove
from tests.servers.program import wait_until
from tests.store import deployments
from tests.store.deployments import Site
from tests.store.record_harness import SECOND, Harness, keys, store_at
from tests.waiting import eventually

pytestmark = deployments.on(deployments.CLUSTER)


@pytest.fixture
def cluster(site: Site) -> Iterator[ClusterServers]:
    """A cluster that is repaired after the test."""
    assert isinstance(site.behind, ClusterServers)
    yield site.behind
    site.behind.rejoin()


@pytest.fixture
def moving(harness: Harness, cluster: ClusterServers) -> Iterator[SlotMove]:
    """The slot of the key is being migrated; its record has not been moved."""
    with cluster.move_slot(harness.name, cluster.other_master(harness.name)) as moving:
        yield moving


@pytest.mark.exhaustive
def test_a_store_in_use_recovers_from_a_failover(harness: Harness, cluster: ClusterServers) -> None:
    token = harness.started().token
    master, successor = cluster.master_of(harness.name), cluster.replica_of(harness.name)
    wait_until(lambda: successor.is_copy_of(master), "the replica lags")
    cases: list[str] = []

    def completed() -> bool:
        try:
            cases.append(harness.complete(token).case)
        except StoreUnavailableError:
            return False
        return True

    master.kill()
    eventually(completed, seconds=20)
    assert cases == ["ok"]
    assert harness.record().state is State.COMPLETED


@pytest.mark.exhaustive
def test_a_key_begins_at_the_new_master(harness: Harness, cluster: ClusterServers) -> None:
    """The circuit breaker of the failed master keeps no one from its successor."""
    harness.started()
    cluster.master_of(harness.name).kill()
    for _ in range(THRESHOLD):
        with pytest.raises(StoreUnavailableError):
            harness.begin(task_id=SECOND)

    def begun() -> bool:
        with suppress(StoreUnavailableError):
            return bool(harness.begin(task_id=SECOND).case)
        return False

    eventually(begun, seconds=20)
    assert harness.client.get(harness.name)  # finds the new master for later tests


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_hanging_node_does_not_fail_the_calls_of_others(
    site: Site, harness: Harness, cluster: ClusterServers, is_async: bool
) -> None:
    store = RecordStore(StoreConfig(**site.how, timeout=1), repr, is_async=is_async)
    master = cluster.master_of(harness.name)
    other = next(key for key in keys(100) if cluster.master_of(store.name(key)) is not master)
    hanging, healthy = (commands.give_back(key, "task") for key in (harness.key, other))

    async def story() -> None:
        await store.execute_all([hanging, healthy])
        await store.execute(healthy)  # asyncio's client cannot connect while a node hangs
        master.pause()
        with pytest.raises(StoreUnavailableError):
            await store.execute(hanging)
        name = f"node 127.0.0.1:{master.port} cannot be reached"
        for _ in range(3):
            assert (await store.execute(healthy)).case == "reserved"
            with pytest.raises(StoreUnavailableError, match=name):
                await store.execute(hanging)
            refused, reply = await store.execute_all([hanging, healthy])
            assert name in str(refused)
            assert isinstance(reply, Reply)
        await store.aclose()

    try:
        asyncio.run(story()) if is_async else run_sync(story())
    finally:
        master.resume()


class TestSlotMigration:
    def test_an_execution_completes_at_the_node_that_its_record_was_moved_to(
        self, harness: Harness, cluster: ClusterServers
    ) -> None:
        token = harness.started().token
        with cluster.move_slot(harness.name, cluster.other_master(harness.name)) as moving:
            moving.migrate_keys()
            assert harness.begin(task_id=SECOND).case == "held"
            assert harness.extend(token).case == "ok"
            assert harness.save_step(token).case == "ok"
            assert harness.complete(token).case == "ok"
            assert run_sync(harness.store.get(harness.key)).state is State.COMPLETED

        assert harness.begin(task_id=SECOND).case == "finished"

    def test_a_new_key_begins_at_the_new_node_during_the_migration(
        self, harness: Harness, cluster: ClusterServers, moving: SlotMove
    ) -> None:
        token = harness.started().token

        moving.stop()

        assert harness.complete(token).case == "ok"
        with cluster.master_of(harness.name).client() as client:
            assert client.get(harness.name) == harness.raw

    def test_a_heartbeat_serves_both_nodes(self, harness: Harness, cluster: ClusterServers) -> None:
        ten = keys(10)
        leases = [harness.lease_of(key) for key in ten]
        name = harness.store.name(ten[0])

        def cases() -> list[str]:
            replies = run_sync(harness.store.extend(leases))
            return [reply.case if isinstance(reply, Reply) else str(reply) for reply in replies]

        with cluster.move_slot(name, cluster.other_master(name)) as moving:
            assert cases() == ["ok"] * 10
            moving.migrate_keys()
            assert cases() == ["ok"] * 10
        assert cases() == ["ok"] * 10


def test_begin_waits_for_a_replica(harness: Harness, site: Site, cluster: ClusterServers) -> None:
    careful = Harness(store_at(**site.how, wait_replicas=1), harness.client)
    careful.completed()
    careful.forget()
    replica = cluster.replica_of(harness.name)
    replica.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas"):
            careful.begin()
    finally:
        replica.resume()
