"""Redis cannot be asked, or says no: one kind of error, told in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery_idempotent.errors import StoreUnavailableError
from celery_idempotent.testing.server import RedisServer
from tests.store.record_harness import Scene, store_at
from tests.waiting import eventually

CALLS: dict[str, Callable[[Scene], object]] = {
    "begin": lambda scene: scene.begin(),
    "complete": lambda scene: scene.complete(17),
    "fail": lambda scene: scene.fail(17),
    "release": lambda scene: scene.release(17),
    "extend": lambda scene: scene.extend(17),
    "save_step": lambda scene: scene.step(17),
    "abandon": lambda scene: scene.abandon(),
    "reserve": lambda scene: scene.reserve(),
    "forget": lambda scene: scene.forget(),
    "mark_continued": lambda scene: scene.dispatched(),
    "get": lambda scene: scene.store.look_up(scene.key),
    "ping": lambda scene: scene.store.ping(),
}


@pytest.mark.parametrize("call", CALLS)
def test_nobody_listens(call: str, tmp_path: Path) -> None:
    nowhere = Scene(store_at(f"redis+socket://{tmp_path}/nobody"), redis.Redis())

    with pytest.raises(StoreUnavailableError, match="Redis cannot be reached") as caught:
        CALLS[call](nowhere)
    assert "\n" not in str(caught.value)


def test_the_server_is_frozen(server: RedisServer, scene: Scene) -> None:
    impatient = Scene(store_at(server.url + "?socket_timeout=0.3"), scene.client)
    impatient.store.ping()
    server.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            impatient.begin()
    finally:
        server.resume()

    assert impatient.begin().case in ("begun", "held")


def test_the_server_has_been_restarted(scene: Scene, server: RedisServer) -> None:
    first = scene.started().token
    server.restart()

    answer = scene.begin()

    assert answer.case == "begun"
    assert answer.token > first


@pytest.fixture
def full(server: RedisServer, client: redis.Redis) -> Iterator[None]:
    client.config_set("maxmemory", "1")
    yield
    client.config_set("maxmemory", "0")


def test_the_server_is_full(scene: Scene, full: None) -> None:
    with pytest.raises(StoreUnavailableError, match="Redis refuses: .*maxmemory"):
        scene.begin()


@pytest.fixture
def read_only(server: RedisServer, client: redis.Redis) -> Iterator[None]:
    client.replicaof("127.0.0.1", "1")
    yield
    client.replicaof("NO", "ONE")


def test_the_server_has_become_a_replica(scene: Scene, read_only: None) -> None:
    with pytest.raises(StoreUnavailableError):
        scene.begin()


def test_the_server_wants_a_password(scene: Scene, server: RedisServer) -> None:
    scene.client.config_set("requirepass", "secret")
    try:
        stranger = Scene(store_at(server.url), scene.client)
        with pytest.raises(StoreUnavailableError) as caught:
            stranger.begin()
    finally:
        scene.client.config_set("requirepass", "")

    assert "secret" not in str(caught.value)


def test_the_server_comes_back_and_so_does_the_store(scene: Scene, server: RedisServer) -> None:
    scene.store.ping()
    server.kill()
    with pytest.raises(StoreUnavailableError):
        scene.store.ping()

    server.restart()

    eventually(lambda: scene.begin().case == "begun")
