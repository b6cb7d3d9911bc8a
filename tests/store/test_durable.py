"""A server with appendfsync always is killed: an execution completes after its restart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.core.store import scripts
from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import OWNER, SECOND, RecordHarness, close_stores, store_at


@pytest.fixture(scope="module", params=deployments.KINDS)
def durable(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    config = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer.start(request.param, config=config) as server:
        yield server


@pytest.fixture
def harness(durable: RedisServer) -> Iterator[RecordHarness]:
    with durable.client() as client:
        client.flushall()
        yield RecordHarness(store_at(durable.url), client)
        close_stores()


def crash(server: RedisServer) -> None:
    server.kill()
    server.restart()


def test_between_begin_and_complete(harness: RecordHarness, durable: RedisServer) -> None:
    begun = harness.started(execution_id=OWNER)
    raw = harness.raw

    crash(durable)

    assert harness.raw == raw
    assert harness.client.script_exists(scripts.load("settle").sha) == [False]
    assert harness.begin(task_id=SECOND).case == "held"
    assert harness.begin(execution_id=OWNER).token == begun.token
    assert harness.extend(begun.token).case == "ok"
    assert harness.complete(begun.token).case == "ok"


def test_after_complete(harness: RecordHarness, durable: RedisServer) -> None:
    done = harness.completed()

    crash(durable)

    assert harness.begin(task_id=SECOND).case == "finished"
    assert harness.record() == done
    assert harness.left_ms() > 0


def test_tokens_grow_across_a_restart(harness: RecordHarness, durable: RedisServer) -> None:
    before = harness.started().token
    harness.abandon()

    crash(durable)

    reply = harness.begin(task_id=SECOND)
    assert (reply.case, reply.stored.attempt) == ("begun", 2)
    assert reply.token > before
    assert harness.complete(before).case == "lost"
