"""A Redis that was told to keep everything is killed: what was begun is completed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.store import scripts
from celery_idempotent.testing.server import RedisServer
from tests.store import deployments as sites
from tests.store.record_harness import OWNER, SECOND, Scene, close_stores, store_at


@pytest.fixture(scope="module", params=sites.KINDS)
def durable(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    config = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer.start(request.param, config=config) as server:
        yield server


@pytest.fixture
def scene(durable: RedisServer) -> Iterator[Scene]:
    with durable.client() as client:
        client.flushall()
        yield Scene(store_at(durable.url), client)
        close_stores()


def crash(server: RedisServer) -> None:
    server.kill()
    server.restart()


def test_between_begin_and_complete(scene: Scene, durable: RedisServer) -> None:
    begun = scene.started(owner=OWNER)
    raw = scene.raw

    crash(durable)

    assert scene.raw == raw
    assert scene.client.script_exists(scripts.load("complete").sha) == [False]
    assert scene.begin(task_id=SECOND).case == "held"
    assert scene.begin(owner=OWNER).token == begun.token
    assert scene.extend(begun.token).case == "ok"
    assert scene.complete(begun.token).case == "ok"


def test_after_complete(scene: Scene, durable: RedisServer) -> None:
    done = scene.completed()

    crash(durable)

    assert scene.begin(task_id=SECOND).case == "finished"
    assert scene.record() == done
    assert scene.left_ms() > 0


def test_a_token_is_greater_than_those_before(scene: Scene, durable: RedisServer) -> None:
    before = scene.started().token
    scene.abandon()

    crash(durable)

    answer = scene.begin(task_id=SECOND)
    assert (answer.case, answer.there.attempt) == ("begun", 2)
    assert answer.token > before
    assert scene.complete(before).case == "lost"
