"""The server's clock is set: leases end early or late, and nobody completes twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.testing.server import RedisServer
from tests.store import deployments as sites
from tests.store.record_harness import LEASE_MS, SECOND, Scene, close_stores, store_at

pytestmark = pytest.mark.clock

HOUR = 3600


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer.start(sites.ANY, clock=True) as server:
        yield server


@pytest.fixture
def scene(server: RedisServer) -> Iterator[Scene]:
    with server.client() as client:
        yield Scene(store_at(server.url), client)
        close_stores()


def test_forward_a_lease_is_over_and_its_holder_is_refused(
    scene: Scene, server: RedisServer
) -> None:
    first = scene.started()
    assert scene.begin(task_id=SECOND).case == "held"

    server.step_clock(LEASE_MS / 1000 + 1)

    second = scene.begin(task_id=SECOND)
    assert (second.case, second.there.attempt) == ("begun", 2)
    assert second.token > first.token
    assert scene.extend(first.token).case == "lost"
    assert scene.complete(first.token).case == "lost"
    assert scene.complete(second.token).case == "ok"


def test_forward_a_lease_that_nobody_took_is_still_its_holders(
    scene: Scene, server: RedisServer
) -> None:
    token = scene.started().token

    server.step_clock(LEASE_MS / 1000 + 1)

    assert scene.extend(token).case == "ok"
    assert scene.begin(task_id=SECOND).case == "held"
    assert scene.complete(token).case == "ok"


def test_forward_past_the_retention_the_record_is_forgotten(
    scene: Scene, server: RedisServer
) -> None:
    before = scene.completed().token

    server.step_clock(2 * HOUR)

    assert scene.raw is None
    assert scene.started().token > before


def test_backward_tokens_still_grow(scene: Scene, server: RedisServer) -> None:
    first = scene.started()
    scene.abandon()
    server.step_clock(-HOUR)

    assert scene.begin(task_id=SECOND).case == "held"  # until the clock is there again
    server.step_clock(HOUR)
    second = scene.begin(task_id=SECOND)
    assert second.case == "begun"
    assert second.token > first.token
    server.step_clock(-HOUR)
    assert scene.complete(first.token).case == "lost"
    assert scene.complete(second.token).case == "ok"


def test_backward_a_lease_goes_on_by_the_new_clock(scene: Scene, server: RedisServer) -> None:
    token = scene.started().token
    server.step_clock(-HOUR)

    extended = scene.extend(token)

    assert extended.case == "ok"
    assert scene.record().at_ms <= scene.now_ms() + LEASE_MS
    assert scene.complete(token).case == "ok"
