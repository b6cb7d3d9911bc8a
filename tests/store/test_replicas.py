"""``wait_replicas``: writes are acknowledged by replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from celery_idempotent.core.record import State
from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.node import THRESHOLD
from celery_idempotent.errors import StoreUnavailableError
from tests.conftest import exhaustive_except
from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer
from tests.store.deployments import KINDS
from tests.store.record_harness import Harness, close_stores, store_at

#: Longer than a connected replica takes.
PATIENT = {"wait_replicas": 1, "timeout": 8.0}
#: For a frozen replica: a write waits for a quarter of the time limit.
HASTY = {"wait_replicas": 1, "timeout": 1.2}
TOO_FEW = "only 0 of 1 replicas"


@pytest.fixture(scope="module", params=exhaustive_except(KINDS, *KINDS[:1]))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[RedisServer, RedisServer]]:
    with (
        RedisServer.start(request.param, config={}) as master,
        RedisServer.start(request.param, replica_of=master) as replica,
    ):
        yield master, replica


@pytest.fixture
def master(pair: tuple[RedisServer, RedisServer]) -> RedisServer:
    return pair[0]


@pytest.fixture
def replica(pair: tuple[RedisServer, RedisServer]) -> Iterator[RedisServer]:
    yield pair[1]
    pair[1].resume()


@pytest.fixture
def harness(master: RedisServer, replica: RedisServer) -> Iterator[Harness]:
    with master.client() as client:
        client.flushall()
        yield Harness(store_at(master.url, **PATIENT), client)
        close_stores()


@pytest.fixture
def hasty(master: RedisServer, harness: Harness) -> Harness:
    """The same key, through a store with a short timeout."""
    return Harness(store_at(master.url, **HASTY), harness.client)


def has_the_same(replica: RedisServer, harness: Harness) -> bool:
    """Returns whether the replica has the record of the master."""
    with replica.client() as client:
        return bool(client.get(harness.name) == harness.raw)


@pytest.mark.parametrize("transition", ["begin", "save_step", "complete", "fail"])
def test_a_connected_one_has_it(harness: Harness, replica: RedisServer, transition: str) -> None:
    token = harness.started().token
    if transition != "begin":
        assert getattr(harness, transition)(token).case == "ok"

    assert has_the_same(replica, harness)
    assert (harness.state is State.STARTED) == (transition in ("begin", "save_step"))


class TestFrozenReplica:
    def test_is_waited_for_until_timeout(self, hasty: Harness, replica: RedisServer) -> None:
        replica.pause()
        began_at = time.monotonic()

        with pytest.raises(StoreUnavailableError, match=TOO_FEW):
            hasty.begin()

        assert 0.3 <= time.monotonic() - began_at < hasty.store.config.timeout / 2

    def test_begin_is_granted_when_it_is_sent_again(
        self, harness: Harness, hasty: Harness, replica: RedisServer
    ) -> None:
        execution_id = os.urandom(8)
        replica.pause()
        with pytest.raises(StoreUnavailableError):
            hasty.begin(execution_id=execution_id)
        replica.resume()

        reply = harness.begin(execution_id=execution_id)

        assert (reply.case, reply.stored.attempt) == ("begun", 1)
        assert has_the_same(replica, harness)

    @pytest.mark.parametrize("transition", ["complete", "fail", "save_step"])
    def test_an_outcome_succeeds_only_when_it_resumes(
        self,
        harness: Harness,
        hasty: Harness,
        master: RedisServer,
        replica: RedisServer,
        transition: str,
    ) -> None:
        elsewhere = Harness(store_at(master.url, **HASTY), harness.client)
        token = harness.started().token
        replica.pause()
        # The second time the script writes nothing, and its WAIT must not return at once: neither
        # on the connection of the first time, nor on another one.
        for sender in (hasty, hasty, elsewhere):
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                getattr(sender, transition)(token)
        replica.resume()

        assert getattr(harness, transition)(token).case == "ok"
        assert has_the_same(replica, harness)

    def test_a_lost_reply_does_not_satisfy_the_wait(
        self, harness: Harness, master: RedisServer, replica: RedisServer
    ) -> None:
        token = harness.started().token
        complete = scripts.load("settle")
        harness.client.script_load(complete.source)
        replica.pause()
        with Proxy(master.url) as proxy:
            behind = Harness(store_at(proxy.url, **HASTY), harness.client)
            proxy.lose_reply(to=complete.sha)
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                behind.complete(token)
            assert len(proxy.requests_with(complete.sha)) == 2

    def test_does_not_open_the_breaker(self, hasty: Harness, replica: RedisServer) -> None:
        replica.pause()
        execution_id = os.urandom(8)
        for _ in range(THRESHOLD + 1):
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                hasty.begin(execution_id=execution_id)

        assert not hasty.store.node.breaker.open

    @pytest.mark.parametrize("transition", ["extend", "release", "forget"])
    def test_other_transitions_do_not_wait(
        self, harness: Harness, hasty: Harness, replica: RedisServer, transition: str
    ) -> None:
        record = harness.started()
        replica.pause()

        shown = record if transition == "forget" else record.token
        assert getattr(hasty, transition)(shown).case == "ok"

    def test_replays_go_on(self, harness: Harness, hasty: Harness, replica: RedisServer) -> None:
        harness.completed()
        replica.pause()

        assert hasty.begin().case == "finished"
