"""A cluster changes under the store: a master dies, a slot moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import State
from celery_idempotent.store import scripts
from celery_idempotent.store.commands import Extension
from celery_idempotent.store.scripts import Reply
from celery_idempotent.testing.process import wait_until
from tests.servers.cluster import ClusterOfSix, SlotMove
from tests.store import deployments as sites
from tests.store.deployments import Site
from tests.store.record_harness import LEASE_MS, RETENTION_MS, SECOND, Scene, store_at
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("site", sites.params(sites.CLUSTER), indirect=True)


@pytest.fixture
def cluster(site: Site) -> Iterator[ClusterOfSix]:
    """Whole again after the test, whatever died in it."""
    assert isinstance(site.behind, ClusterOfSix)
    yield site.behind
    site.behind.rejoin()


@pytest.fixture
def moving(scene: Scene, cluster: ClusterOfSix) -> Iterator[SlotMove]:
    """The slot of the scene's key is on its way; its record, if any, has not moved yet."""
    with cluster.move_slot(scene.name, cluster.other_master(scene.name)) as moving:
        yield moving


def test_the_heir_completes_what_the_dead_master_began(scene: Scene, cluster: ClusterOfSix) -> None:
    begun = scene.started()
    heir = cluster.replica_of(scene.name)
    with heir.client() as client:
        client.script_flush()  # where a version lets replicas learn what their master runs

    cluster.kill_master_of(scene.name)

    with heir.client() as client:
        assert client.script_exists(scripts.load("complete").sha) == [False]
    assert scene.extend(begun.token).case == "ok"
    assert scene.complete(begun.token).case == "ok"
    assert scene.begin(task_id=SECOND).case == "finished"
    assert scene.record().attempt == 1


def test_a_store_that_asks_all_the_while_gets_its_answer(
    scene: Scene, cluster: ClusterOfSix
) -> None:
    token = scene.started().token
    master, heir = cluster.master_of(scene.name), cluster.replica_of(scene.name)
    wait_until(lambda: heir.is_copy_of(master), "the replica lags")
    cases: list[str] = []

    def completed() -> bool:
        try:
            cases.append(scene.complete(token).case)
        except StoreUnavailableError:
            return False
        return True

    master.kill()
    eventually(completed, seconds=20)
    assert cases == ["ok"]
    assert scene.record().state is State.COMPLETED


class TestSlotOnItsWay:
    def test_what_was_begun_before_is_completed_before(
        self, scene: Scene, cluster: ClusterOfSix
    ) -> None:
        token = scene.started().token
        with cluster.move_slot(scene.name, cluster.other_master(scene.name)):
            assert scene.extend(token).case == "ok"
            assert scene.complete(token).case == "ok"

        assert scene.begin(task_id=SECOND).case == "finished"

    def test_what_was_begun_before_is_completed_where_it_was_carried(
        self, scene: Scene, cluster: ClusterOfSix
    ) -> None:
        token = scene.started().token
        with cluster.move_slot(scene.name, cluster.other_master(scene.name)) as moving:
            moving.carry()
            assert scene.begin(task_id=SECOND).case == "held"
            assert scene.extend(token).case == "ok"
            assert scene.step(token).case == "ok"
            assert scene.complete(token).case == "ok"
            record = scene.store.look_up(scene.key)
            assert record is not None
            assert record.state is State.COMPLETED

        assert scene.begin(task_id=SECOND).case == "finished"

    def test_what_was_begun_before_is_completed_after(
        self, scene: Scene, cluster: ClusterOfSix
    ) -> None:
        token = scene.started().token
        with cluster.move_slot(scene.name, cluster.other_master(scene.name)):
            pass

        assert scene.extend(token).case == "ok"
        assert scene.complete(token).case == "ok"
        assert scene.begin(task_id=SECOND).case == "finished"

    def test_a_new_key_begins_at_the_new_master(
        self, scene: Scene, cluster: ClusterOfSix, moving: SlotMove
    ) -> None:
        token = scene.started().token
        assert scene.begin(task_id=SECOND).case == "held"

        moving.finish()

        assert scene.complete(token).case == "ok"
        with cluster.master_of(scene.name).client() as client:
            assert client.get(scene.name) == scene.raw

    def test_a_heartbeat_extends_leases_wherever_they_are(
        self, scene: Scene, cluster: ClusterOfSix
    ) -> None:
        keys = [Key("shop.charge", f"{number:022}") for number in range(10)]
        leases = [
            Extension(key, scene.started(key=key).token, LEASE_MS, RETENTION_MS) for key in keys
        ]
        name = scene.store.name(keys[0])

        def cases() -> list[str]:
            replies = scene.store.extend(leases)
            return [reply.case if isinstance(reply, Reply) else str(reply) for reply in replies]

        with cluster.move_slot(name, cluster.other_master(name)) as moving:
            assert cases() == ["ok"] * 10
            moving.carry()
            assert cases() == ["ok"] * 10
        assert cases() == ["ok"] * 10

    def test_a_begin_that_waits_for_replicas_finds_them(
        self, scene: Scene, site: Site, cluster: ClusterOfSix
    ) -> None:
        careful = Scene(store_at(**site.how, wait_replicas=1), scene.client)
        token = careful.started().token
        with cluster.move_slot(scene.name, cluster.other_master(scene.name)) as moving:
            assert careful.step(token).case == "ok"
            moving.carry()
            assert careful.complete(token).case == "ok"
        assert careful.begin(task_id=SECOND).case == "finished"


def test_a_begin_counts_when_the_replica_has_it(
    scene: Scene, site: Site, cluster: ClusterOfSix
) -> None:
    careful = Scene(store_at(**site.how, wait_replicas=1, wait_timeout=0.3), scene.client)
    careful.completed()
    careful.forget()
    replica = cluster.replica_of(scene.name)
    replica.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="only 0 of 1 replicas"):
            careful.begin()
    finally:
        replica.resume()
