"""What each fault of the proxy does with a request and its reply."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.faults.proxy import Proxy


@pytest.fixture
def through(proxy: Proxy, client: redis.Redis) -> Iterator[redis.Redis]:
    """A client that is connected through the proxy and does not retry."""
    client.flushall()
    with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=0.3) as through:
        through.ping()
        yield through


@pytest.mark.parametrize(
    ("fault", "error", "executed"),
    [
        ("lose_request", redis.ConnectionError, None),
        ("lose_reply", redis.ConnectionError, b"1"),
        ("swallow_reply", redis.TimeoutError, b"1"),
    ],
)
def test_a_fault_of_one_call(
    proxy: Proxy, client: redis.Redis, through: redis.Redis, fault: str, error: type, executed: Any
) -> None:
    getattr(proxy, fault)(to="target")

    through.incr("other")
    assert proxy.pending == 1
    with pytest.raises(error):
        through.incr("target")

    assert proxy.pending == 0
    assert client.get("target") == executed
    assert through.incr("target") == 1 + int(executed or 0)


def test_a_delayed_reply_arrives_later(proxy: Proxy, through: redis.Redis) -> None:
    proxy.delay_reply(to="target", seconds=0.1)

    sent = time.monotonic()
    assert through.incr("target") == 1
    assert time.monotonic() - sent >= 0.1


@pytest.mark.parametrize(
    ("fault", "error"), [("refuse", redis.ConnectionError), ("black_hole", redis.TimeoutError)]
)
def test_it_lasts_until_heal(proxy: Proxy, through: redis.Redis, fault: str, error: type) -> None:
    getattr(proxy, fault)()
    for _ in range(2):
        with pytest.raises(error):
            through.ping()

    proxy.heal()
    assert through.ping()
