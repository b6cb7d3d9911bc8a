"""The engine on Sentinel and Cluster, in blocking code and in coroutines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
import redis.asyncio

from celery_idempotent import Decision, Idempotency
from celery_idempotent.errors import SettingsError
from tests.conftest import exhaustive_except
from tests.functions.conftest import Run
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

BATCH = [str(n) for n in range(100)]
LEASE = 6.0  # on a busy machine, a cluster's client needs seconds to connect to all nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    with ClusterServers.start() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sentinels() -> Iterator[SentinelServers]:
    with SentinelServers.start() as sentinels:
        yield sentinels


@pytest.fixture(params=exhaustive_except(["sentinels", "cluster"], "cluster"))
def idem(request: pytest.FixtureRequest) -> Iterator[Idempotency]:
    servers = request.getfixturevalue(request.param)
    options: dict[str, Any] = {}
    if request.param == "sentinels":
        options["redis_options"] = {"master_name": servers.master_name}
    engine = Idempotency(servers.url, key_prefix=uuid4().hex, lease=LEASE, **options)
    yield engine
    engine.close()


def test_blocking_functions_blocks_and_batches(idem: Idempotency) -> None:
    runs = []

    @idem.idempotent(name="charge")
    def charge(order: int) -> int:
        runs.append(order)
        return order

    assert [charge(order) for order in (1, 2, 3, 1, 2, 3)] == [1, 2, 3, 1, 2, 3]
    assert runs == [1, 2, 3]
    with idem.execution("block") as execution:
        execution.complete(1)
    with idem.begin_many(BATCH) as batch:
        assert {entry.decision for entry in batch} == {Decision.RUN}
        assert batch.complete_many(dict.fromkeys(BATCH, "done")) == {}
    assert [entry.replay for entry in idem.begin_many(BATCH)] == ["done"] * len(BATCH)


@pytest.mark.exhaustive
def test_coroutine_functions_and_async_batches(idem: Idempotency, run: Run) -> None:
    runs = []

    @idem.idempotent(name="charge")
    async def charge(order: int) -> int:
        runs.append(order)
        await asyncio.sleep(1.2 * LEASE)
        idem.current.check()
        return order

    async def use_engine() -> None:
        results = await asyncio.gather(*(charge(order) for order in (1, 2, 3, 1, 2, 3)))
        assert results == [1, 2, 3, 1, 2, 3]
        async with await idem.abegin_many(BATCH) as batch:
            assert {entry.decision for entry in batch} == {Decision.RUN}
            assert await batch.complete_many(dict.fromkeys(BATCH, "done")) == {}
        again = await idem.abegin_many(BATCH)
        assert [entry.replay for entry in again] == ["done"] * len(BATCH)

    run(use_engine())
    assert sorted(runs) == [1, 2, 3]


def test_wait_replicas_is_rejected_for_coroutines_on_a_cluster(cluster: ClusterServers) -> None:
    engine = Idempotency(cluster.url, wait_replicas=1)

    with pytest.raises(SettingsError, match="cannot be used by async callers with a cluster"):
        _ = engine.async_executor


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    """Disables the garbage collector, so that leaked connections stay open."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize(
    "kind", exhaustive_except(["server", "sentinels", "cluster"], "server", "cluster")
)
def test_close_closes_connections_to_every_node(request: pytest.FixtureRequest, kind: str) -> None:
    servers = request.getfixturevalue(kind)
    nodes = [servers] if kind == "server" else list(servers.nodes)
    options: dict[str, Any] = {"client_name": (name := uuid4().hex)}
    if kind == "sentinels":
        nodes += servers.sentinels
        options |= {"master_name": servers.master_name, "sentinel_kwargs": options.copy()}
    engine = Idempotency(servers.url, key_prefix=name, redis_options=options)

    def connected_ports() -> set[int]:
        """Returns the ports of the nodes to which the engine has connections."""
        with ExitStack() as clients:
            lists = [(n, clients.enter_context(n.client()).client_list()) for n in nodes]
        return {n.port for n, listed in lists if any(c["name"] == name for c in listed)}

    async def use_engine() -> None:
        async with engine.execution("async") as execution:
            await execution.complete(1)
        assert connected_ports()
        await engine.aclose()
        eventually(lambda: not connected_ports())

    with engine.execution("blocking") as execution:
        execution.complete(1)
    assert [record.result for record in engine.records()] == [1]
    assert connected_ports()
    engine.close()
    eventually(lambda: not connected_ports())
    asyncio.run(use_engine())


def test_the_users_client_is_not_closed(server: RedisServer, key: str) -> None:
    user_client, async_client = server.client(), redis.asyncio.Redis.from_url(server.url)
    clients = user_client, async_client
    engine, async_engine = (Idempotency(client, key_prefix=key) for client in clients)
    client_id = user_client.client_id()
    with engine.execution("key") as execution:
        execution.complete(1)

    engine.close()

    assert user_client.client_id() == client_id

    async def use_engine() -> None:
        client_id = await async_client.client_id()
        async with async_engine.execution("another") as execution:
            await execution.complete(1)

        await async_engine.aclose()

        assert await async_client.client_id() == client_id
        await async_client.aclose()

    asyncio.run(use_engine())
    user_client.close()
