"""``wait_replicas`` and ``wait_aof``: what must not be forgotten counts once others have it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from celery_idempotent.errors import SettingsError, StoreUnavailableError
from celery_idempotent.record.record import State
from celery_idempotent.store import replicas, scripts
from celery_idempotent.store.config import Place
from celery_idempotent.store.scripts import Reply
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.store.deployments import KINDS
from tests.store.record_harness import Scene, close_stores, store_at

#: A replica that follows has it long before.
PATIENT = {"wait_replicas": 1, "wait_timeout": 2.0}
#: One that is frozen has it never.
HASTY = {"wait_replicas": 1, "wait_timeout": 0.1}
TOO_FEW = "only 0 of 1 replicas have it"


@pytest.fixture(scope="module", params=KINDS)
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
def scene(master: RedisServer, replica: RedisServer) -> Iterator[Scene]:
    with master.client() as client:
        client.flushall()
        yield Scene(store_at(master.url, **PATIENT), client)
        close_stores()


@pytest.fixture
def hasty(master: RedisServer, scene: Scene) -> Scene:
    """The same key, by way of a store that does not wait for long."""
    return Scene(store_at(master.url, **HASTY), scene.client)


def there(scene: Scene, replica: RedisServer) -> State:
    """The state that the replica has, at this moment."""
    with replica.client() as client:
        return Scene(scene.store, client).record().state


class TestAReplicaThatFollows:
    def test_has_a_begin_when_it_counts(self, scene: Scene, replica: RedisServer) -> None:
        scene.started()

        assert there(scene, replica) is State.STARTED

    def test_has_a_step_when_it_counts(self, scene: Scene, replica: RedisServer) -> None:
        assert scene.step(scene.started().token).case == "ok"

        with replica.client() as client:
            assert Scene(scene.store, client).steps == scene.steps

    def test_has_a_result_when_it_counts(self, scene: Scene, replica: RedisServer) -> None:
        assert scene.complete(scene.started().token).case == "ok"

        assert there(scene, replica) is State.COMPLETED

    def test_has_an_error_when_it_counts(self, scene: Scene, replica: RedisServer) -> None:
        assert scene.fail(scene.started().token).case == "ok"

        assert there(scene, replica) is State.FAILED


class TestAReplicaThatIsFrozen:
    def test_is_waited_for_and_then_it_is_an_outage(
        self, hasty: Scene, replica: RedisServer
    ) -> None:
        replica.pause()
        began_at = time.monotonic()

        with pytest.raises(StoreUnavailableError, match=TOO_FEW):
            hasty.begin()

        assert 0.1 <= time.monotonic() - began_at < hasty.store.place.timeout / 2

    def test_begin_is_granted_to_the_message_that_was_put_back(
        self, scene: Scene, hasty: Scene, replica: RedisServer
    ) -> None:
        owner = os.urandom(16)
        replica.pause()
        with pytest.raises(StoreUnavailableError):
            hasty.begin(owner=owner)
        replica.resume()

        answer = scene.begin(prior=owner)

        assert (answer.case, answer.there.attempt) == ("begun", 1)
        assert there(scene, replica) is State.STARTED

    @pytest.mark.parametrize("transition", ["complete", "fail", "save_step"])
    def test_an_outcome_counts_only_once_it_is_thawed(
        self, scene: Scene, hasty: Scene, replica: RedisServer, transition: str
    ) -> None:
        token = scene.started().token
        replica.pause()
        for _ in range(2):
            # The second time there is nothing to change; the WAIT behind it must mean something.
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                getattr(hasty, transition)(token)
        replica.resume()

        assert getattr(scene, transition)(token).case == "ok"
        assert there(scene, replica) is scene.state

    @pytest.mark.parametrize("transition", ["complete", "fail", "save_step"])
    def test_another_connection_does_not_make_it_count(
        self,
        scene: Scene,
        hasty: Scene,
        master: RedisServer,
        replica: RedisServer,
        transition: str,
    ) -> None:
        token = scene.started().token
        replica.pause()
        with pytest.raises(StoreUnavailableError, match=TOO_FEW):
            getattr(hasty, transition)(token)
        elsewhere = Scene(store_at(master.url, **HASTY), scene.client)

        with pytest.raises(StoreUnavailableError, match=TOO_FEW):
            getattr(elsewhere, transition)(token)

    def test_a_lost_reply_does_not_make_it_count(
        self, scene: Scene, master: RedisServer, replica: RedisServer
    ) -> None:
        token = scene.started().token
        complete = scripts.load("complete")
        scene.client.script_load(complete.source)
        replica.pause()
        with Proxy(master.url) as proxy:
            behind = Scene(store_at(proxy.url, **HASTY), scene.client)
            proxy.lose_reply(to=complete.sha)
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                behind.complete(token)
            assert len(proxy.requests_with(complete.sha)) == 2

    def test_does_not_open_the_breaker(self, hasty: Scene, replica: RedisServer) -> None:
        replica.pause()
        owner = os.urandom(16)
        for _ in range(hasty.store.place.breaker_failures + 1):
            with pytest.raises(StoreUnavailableError, match=TOO_FEW):
                hasty.begin(owner=owner)

        assert not hasty.store.breaker.open

    @pytest.mark.parametrize("transition", ["extend", "release", "forget"])
    def test_what_may_be_forgotten_is_not_waited_for(
        self, scene: Scene, hasty: Scene, replica: RedisServer, transition: str
    ) -> None:
        record = scene.started()
        replica.pause()

        shown = record if transition == "forget" else record.token
        assert getattr(hasty, transition)(shown).case == "ok"

    def test_a_duplicate_is_answered(
        self, scene: Scene, hasty: Scene, replica: RedisServer
    ) -> None:
        scene.completed()
        replica.pause()

        assert hasty.begin().case == "finished"


def test_fewer_replicas_than_wanted_are_told(scene: Scene, master: RedisServer) -> None:
    greedy = Scene(store_at(master.url, wait_replicas=2, wait_timeout=0.05), scene.client)

    with pytest.raises(StoreUnavailableError, match="only 1 of 2 replicas have it"):
        greedy.begin()


class TestTheDisk:
    @pytest.fixture(params=KINDS)
    def durable(self, request: pytest.FixtureRequest) -> Iterator[RedisServer]:
        config = {"appendonly": "yes", "appendfsync": "always"}
        with RedisServer.start(request.param, config=config) as server:
            yield server

    @pytest.fixture
    def careful(self, durable: RedisServer) -> Iterator[Scene]:
        with durable.client() as client:
            yield Scene(store_at(durable.url, wait_aof=True), client)
            close_stores()

    @pytest.fixture
    def has_waitaof(self, durable: RedisServer) -> bool:
        version = tuple(map(int, durable.version.split(".")[:2]))
        return durable.flavour == "valkey" or version >= (7, 2)

    def test_is_waited_for_where_the_server_can(
        self, careful: Scene, durable: RedisServer, has_waitaof: bool
    ) -> None:
        if not has_waitaof:
            return  # the next test is this server's
        careful.store.ping()

        assert careful.complete(careful.started().token).case == "ok"

        durable.kill()
        durable.restart()
        assert careful.state is State.COMPLETED

    def test_a_server_that_cannot_is_refused_by_name(
        self, careful: Scene, has_waitaof: bool
    ) -> None:
        if has_waitaof:
            careful.client.config_set("appendonly", "no")

        with pytest.raises(SettingsError, match="^idempotency_wait_aof needs .* appendonly yes; "):
            careful.store.ping()
        with pytest.raises(StoreUnavailableError, match="idempotency_wait_aof needs"):
            careful.begin()

    def test_that_is_too_slow_is_an_outage(self) -> None:
        place = Place(url="redis://shop", wait_aof=True)

        with pytest.raises(StoreUnavailableError, match="not on its disk after 1 s"):
            replicas.check(place, Reply("begun", b"", 0), [0, 0])
