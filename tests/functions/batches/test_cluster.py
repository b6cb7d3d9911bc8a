"""A node of a cluster that does not reply is the error of its own keys; the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from celery_idempotent import Decision, Idempotency, StoreUnavailableError
from celery_idempotent.core.lease.heartbeat import heartbeat
from tests.functions.conftest import Calls
from tests.servers.groups import ClusterServers
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("batches in a cluster")]

#: A key of the first slot, which the first master has.
SLOT_0 = "06S"
#: Begins keys, completes those to run, and returns each decision, error and token, in order.
Use = Callable[[list[str]], list[tuple[Decision, Any, int]]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    """A cluster whose other nodes go on, and whose replicas are not promoted."""
    config = {"cluster-require-full-coverage": "no", "cluster-replica-no-failover": "yes"}
    with ClusterServers.start(config=config) as cluster:
        yield cluster


@pytest.fixture
def engine(request: pytest.FixtureRequest, cluster: ClusterServers) -> Iterator[Idempotency]:
    options = getattr(request, "param", {})
    yield Idempotency(cluster.url, key_prefix=uuid4().hex, redis_timeout=4.0, **options)
    cluster.rejoin()


@pytest.fixture(params=["blocking", "async"])
def use(request: pytest.FixtureRequest, engine: Idempotency) -> Iterator[Use]:
    calls = Calls(request.param, engine)

    def use(keys: list[str]) -> list[tuple[Decision, Any, int]]:
        entries, errors = calls.use_batch(keys)
        assert errors == {}
        return [(entry.decision, entry.error, entry.token) for entry in entries]

    yield use
    calls.close()


def names(count: int = 30) -> list[str]:
    return [uuid4().hex for _ in range(count)]


def master_of(cluster: ClusterServers, engine: Idempotency, key: str) -> RedisServer:
    return cluster.master_of(engine.executor.store.name(engine.key_of(key)))


@pytest.mark.parametrize(
    ("fault", "which"), [("kill", "first"), ("kill", "other"), ("pause", "other")]
)
def test_its_keys_are_rejected_and_the_others_go_on(
    cluster: ClusterServers, engine: Idempotency, use: Use, fault: str, which: str
) -> None:
    """An async client of redis-py cannot connect anew without the first master."""
    use(names())  # connects, and loads the scripts
    keys = names()
    failing = cluster.master_of(SLOT_0) if which == "first" else cluster.other_master(SLOT_0)
    affected = [master_of(cluster, engine, key) is failing for key in keys]
    assert 0 < sum(affected) < len(keys)

    getattr(failing, fault)()
    try:
        results = use(keys)
    finally:
        if fault == "pause":
            failing.resume()

    for (decision, error, _), is_affected in zip(results, affected, strict=True):
        assert decision is (Decision.REJECTED if is_affected else Decision.RUN)
        assert isinstance(error, StoreUnavailableError) is is_affected
    assert not heartbeat.leases()


def test_without_nodes_a_call_fails(cluster: ClusterServers, engine: Idempotency, use: Use) -> None:
    use(names())
    (key,) = names(1)
    master_of(cluster, engine, key).kill()

    with pytest.raises(StoreUnavailableError):
        use([key])


@pytest.mark.parametrize("engine", [{"on_store_error": "run"}], ids=["run"], indirect=True)
def test_the_policy_run_is_per_key(cluster: ClusterServers, engine: Idempotency, use: Use) -> None:
    use(names())
    keys = names()
    failing = master_of(cluster, engine, keys[0])
    affected = [master_of(cluster, engine, key) is failing for key in keys]
    failing.kill()

    results = use(keys)

    assert {decision for decision, *_ in results} == {Decision.RUN}
    assert [token == 0 for *_, token in results] == affected


def test_batches_find_a_new_master(cluster: ClusterServers, engine: Idempotency, use: Use) -> None:
    """Even if the client has sent no other command since the failover."""
    use(names())
    (key,) = names(1)
    name = engine.executor.store.name(engine.key_of(key))
    with cluster.replica_of(name).client() as replica:
        replica.config_set("cluster-replica-no-failover", "no")
    cluster.kill_master_of(name)

    def all_run() -> bool:
        return {decision for decision, *_ in use(names())} == {Decision.RUN}

    eventually(all_run, seconds=20)


def test_a_batch_is_resent_in_few_round_trips(
    cluster: ClusterServers, engine: Idempotency, use: Use
) -> None:
    """As after a failover: a promoted replica does not have the scripts."""

    def reads() -> int:
        number = 0
        for node in cluster.living:
            with node.client() as client:
                number += client.info("stats")["total_reads_processed"]
        return number

    use(names())
    for node in cluster.living:
        with node.client() as client:
            client.script_flush()
    before = reads()

    use(names(300))

    assert reads() - before < 150
