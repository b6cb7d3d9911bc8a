"""The engine on every kind of Redis, in both worlds."""

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
from celery_idempotent.testing.server import RedisServer
from tests.functions.conftest import LEASE
from tests.servers.cluster import ClusterServers
from tests.servers.sentinel import SentinelServers
from tests.waiting import eventually

BATCH = [str(n) for n in range(100)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    with ClusterServers.start() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sentinels() -> Iterator[SentinelServers]:
    with SentinelServers.start() as sentinels:
        yield sentinels


@pytest.fixture(scope="module")
def alone() -> Iterator[RedisServer]:
    with RedisServer.start(config={}) as alone:
        yield alone


@pytest.fixture(params=["sentinels", "cluster"])
def idem(request: pytest.FixtureRequest) -> Iterator[Idempotency]:
    place = request.getfixturevalue(request.param)
    options: dict[str, Any] = {}
    if request.param == "sentinels":
        options["redis_options"] = {"master_name": place.master_name}
    engine = Idempotency(place.url, key_prefix=uuid4().hex, lease=LEASE, **options)
    yield engine
    engine.close()


def test_functions_blocks_and_batches_that_block(idem: Idempotency) -> None:
    runs = []

    @idem.idempotent
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


def test_and_those_that_await(idem: Idempotency) -> None:
    runs = []

    @idem.idempotent
    async def charge(order: int) -> int:
        runs.append(order)
        await asyncio.sleep(1.2 * LEASE)
        idem.current.check()
        return order

    async def story() -> None:
        try:
            answers = await asyncio.gather(*(charge(order) for order in (1, 2, 3, 1, 2, 3)))
            assert answers == [1, 2, 3, 1, 2, 3]
            async with await idem.abegin_many(BATCH) as batch:
                assert {entry.decision for entry in batch} == {Decision.RUN}
                assert await batch.complete_many(dict.fromkeys(BATCH, "done")) == {}
            again = await idem.abegin_many(BATCH)
            assert [entry.replay for entry in again] == ["done"] * len(BATCH)
        finally:
            await idem.aclose()

    asyncio.run(story())
    assert sorted(runs) == [1, 2, 3]


def test_replicas_of_a_cluster_are_not_waited_for_on_a_loop(cluster: ClusterServers) -> None:
    careful = Idempotency(cluster.url, wait_replicas=1)

    with pytest.raises(SettingsError, match="are not for async callers of a cluster"):
        _ = careful.async_executor


@pytest.fixture
def no_garbage_collected() -> Iterator[None]:
    """What is left behind stays connected."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_garbage_collected")
@pytest.mark.parametrize("place", ["alone", "sentinels", "cluster"])
def test_what_is_closed_has_hung_up_everywhere(request: pytest.FixtureRequest, place: str) -> None:
    servers = request.getfixturevalue(place)
    nodes = [servers] if place == "alone" else list(servers.nodes)
    options: dict[str, Any] = {"client_name": (name := uuid4().hex)}
    if place == "sentinels":
        nodes += servers.sentinels
        options |= {"master_name": servers.master_name, "sentinel_kwargs": options.copy()}
    engine = Idempotency(servers.url, key_prefix=name, redis_options=options)

    def connected() -> set[int]:
        """Where the engine is; a node hears of an end a moment later."""
        with ExitStack() as clients:
            lists = [(n, clients.enter_context(n.client()).client_list()) for n in nodes]
        return {n.port for n, listed in lists if any(c["name"] == name for c in listed)}

    async def story() -> None:
        async with engine.execution("async") as execution:
            await execution.complete(1)
        assert connected()
        await engine.aclose()
        eventually(lambda: not connected())

    with engine.execution("blocking") as execution:
        execution.complete(1)
    assert [record.result for record in engine.records()] == [1]
    assert connected()
    engine.close()
    eventually(lambda: not connected())
    asyncio.run(story())


def test_a_client_that_is_lent_is_not_closed() -> None:
    with RedisServer.start() as server, server.client() as own:
        known_as = own.client_id()
        engine = Idempotency(own)
        with engine.execution("key") as execution:
            execution.complete(1)

        engine.close()

        assert own.client_id() == known_as


def test_nor_one_that_awaits() -> None:
    async def story(url: str) -> None:
        own = redis.asyncio.Redis.from_url(url)
        known_as = await own.client_id()
        engine = Idempotency(own)
        async with engine.execution("key") as execution:
            await execution.complete(1)

        await engine.aclose()

        assert await own.client_id() == known_as
        await own.aclose()

    with RedisServer.start() as server:
        asyncio.run(story(server.url))
