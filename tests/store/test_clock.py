"""The server's clock is changed: leases end early or late, and one execution completes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.redis_server import RedisServer
from tests.store import deployments
from tests.store.record_harness import LEASE_MS, SECOND, Harness, close_stores, store_at

pytestmark = pytest.mark.clock

HOUR = 3600


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer.start(deployments.ANY, clock=True) as server:
        yield server


@pytest.fixture
def harness(server: RedisServer) -> Iterator[Harness]:
    with server.client() as client:
        yield Harness(store_at(server.url), client)
        close_stores()


def test_forward_a_lease_expires_and_is_taken_over(harness: Harness, server: RedisServer) -> None:
    first = harness.started()
    assert harness.begin(task_id=SECOND).case == "held"

    server.step_clock(LEASE_MS / 1000 + 1)

    assert harness.begin(task_id=SECOND).case == "held", "it marks the lease"
    server.step_clock(2 * HOUR)
    second = harness.begin(task_id=SECOND)
    assert (second.case, second.stored.attempt) == ("begun", 1), "the first was not confirmed"
    assert second.token > first.token
    assert harness.extend(first.token).case == "lost"
    assert harness.complete(first.token).case == "lost"
    assert harness.complete(second.token).case == "ok"


def test_backward_tokens_still_grow(harness: Harness, server: RedisServer) -> None:
    first = harness.started()
    harness.abandon()
    server.step_clock(-HOUR)

    assert harness.begin(task_id=SECOND).case == "held"  # up to the old deadline
    server.step_clock(HOUR)
    second = harness.begin(task_id=SECOND)
    assert second.case == "begun"
    assert second.token > first.token
    server.step_clock(-HOUR)
    assert harness.complete(first.token).case == "lost"
    assert harness.complete(second.token).case == "ok"
