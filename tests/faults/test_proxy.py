"""Tests of the proxy's faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from tests.faults.proxy import Proxy
from tests.servers.redis_server import RedisServer

SHORT_TIMEOUT = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer.start(password="s3cret/@:") as server:
        yield server


@pytest.fixture
def direct(server: RedisServer) -> Iterator[redis.Redis]:
    """A client that is connected directly to the server, which is emptied first."""
    with server.client(decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def client(proxy: Proxy, direct: redis.Redis) -> Iterator[redis.Redis]:
    """A client that is connected through the proxy and does not retry."""
    with redis.Redis.from_url(
        proxy.url, retry=None, decode_responses=True, socket_timeout=5
    ) as client:
        client.ping()
        yield client


def client_with_short_timeout(proxy: Proxy) -> redis.Redis:
    return redis.Redis.from_url(proxy.url, retry=None, socket_timeout=SHORT_TIMEOUT)


def test_without_faults_all_data_is_forwarded(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    value = "x" * 3_000_000
    client.set("key", value)

    assert direct.get("key") == value
    assert client.get("key") == value
    assert [bytes(request)[:40] for request in proxy.requests_with("GET")] == [
        b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    ]


def test_a_lost_request_does_not_reach_the_server(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.lose_request(to="target")

    client.incr("other")
    assert proxy.pending == 1
    with pytest.raises(redis.ConnectionError):
        client.incr("target")

    assert proxy.pending == 0
    assert direct.get("target") is None
    assert client.incr("target") == 1


def test_the_request_of_a_lost_reply_reaches_the_server(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.lose_reply(to="target")

    with pytest.raises(redis.ConnectionError):
        client.incr("target")

    assert direct.get("target") == "1"
    assert client.incr("target") == 2


def test_a_swallowed_reply_leaves_the_connection_open(proxy: Proxy, direct: redis.Redis) -> None:
    proxy.swallow_reply(to="target")

    with pytest.raises(redis.TimeoutError):
        client_with_short_timeout(proxy).incr("target")

    assert direct.get("target") == "1"


def test_a_delayed_reply_arrives_later(proxy: Proxy, client: redis.Redis) -> None:
    proxy.delay_reply(to="target", seconds=0.1)

    sent = time.monotonic()
    assert client.incr("target") == 1
    assert time.monotonic() - sent >= 0.1
    assert client.incr("target") == 2


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_connections_are_closed_and_new_ones_accepted(
    proxy: Proxy, client: redis.Redis, reset: bool
) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.blpop("nothing", timeout=5)
        except redis.ConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not proxy.requests_with("BLPOP"):
        time.sleep(0.001)
    assert (proxy.reset if reset else proxy.cut)() == 1
    thread.join()

    (error,) = errors
    assert ("reset by peer" in str(error)) == reset
    assert client.ping()


def test_connections_are_refused_until_heal(proxy: Proxy, client: redis.Redis) -> None:
    assert proxy.refuse() == 1
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        client_with_short_timeout(proxy).ping()
    proxy.refuse()

    proxy.heal()
    assert client.ping()


def test_a_black_hole_holds_data_back_until_heal(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.black_hole()
    with pytest.raises(redis.TimeoutError):
        client_with_short_timeout(proxy).ping()
    before = len(proxy.requests)
    replies: list[int] = []
    thread = threading.Thread(target=lambda: replies.append(client.incr("key")))
    thread.start()
    while len(proxy.requests) == before:
        time.sleep(0.001)
    assert direct.get("key") is None

    proxy.heal()
    thread.join()
    assert replies == [1]
    assert direct.get("key") == "1"


def test_jitter_delays_requests_and_replies_until_heal(proxy: Proxy, client: redis.Redis) -> None:
    client.ping()
    proxy.jitter(0.1, 0.2)

    sent = time.monotonic()
    assert client.ping()
    assert time.monotonic() - sent >= 0.2

    proxy.jitter(60.0, 60.0)
    proxy.heal()
    assert client.ping()


def test_a_stopped_proxy_refuses_connections(proxy: Proxy, client: redis.Redis) -> None:
    proxy.black_hole()
    proxy.stop()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        client_with_short_timeout(proxy).ping()
