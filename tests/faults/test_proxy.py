"""The proxy does to connections what it says, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.servers.redis_server import ConfigurableRedisServer

IMPATIENCE = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with ConfigurableRedisServer.start(password="s3cret/@:") as server:
        yield server


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server.url) as proxy:
        yield proxy


@pytest.fixture
def beyond(server: RedisServer) -> Iterator[redis.Redis]:
    """The server itself."""
    with server.client(decode_responses=True) as client:
        client.flushall()
        yield client


@pytest.fixture
def client(proxy: Proxy, beyond: redis.Redis) -> Iterator[redis.Redis]:
    """By way of the proxy, connected, and without a second try; the server is empty."""
    with redis.Redis.from_url(
        proxy.url, retry=None, decode_responses=True, socket_timeout=5
    ) as client:
        client.ping()
        yield client


def impatient(proxy: Proxy) -> redis.Redis:
    return redis.Redis.from_url(proxy.url, retry=None, socket_timeout=IMPATIENCE)


def test_left_alone_it_is_a_wire(proxy: Proxy, client: redis.Redis, beyond: redis.Redis) -> None:
    value = "x" * 3_000_000
    client.set("key", value)

    assert beyond.get("key") == value
    assert client.get("key") == value
    assert [bytes(request)[:40] for request in proxy.requests_with("GET")] == [
        b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    ]


def test_a_lost_request_never_arrives(
    proxy: Proxy, client: redis.Redis, beyond: redis.Redis
) -> None:
    proxy.lose_request(to="wanted")

    client.incr("other")
    assert proxy.pending == 1
    with pytest.raises(redis.ConnectionError):
        client.incr("wanted")

    assert proxy.pending == 0
    assert beyond.get("wanted") is None
    assert client.incr("wanted") == 1


def test_a_lost_reply_is_of_a_request_that_arrived(
    proxy: Proxy, client: redis.Redis, beyond: redis.Redis
) -> None:
    proxy.lose_reply(to="wanted")

    with pytest.raises(redis.ConnectionError):
        client.incr("wanted")

    assert beyond.get("wanted") == "1"
    assert client.incr("wanted") == 2


def test_a_swallowed_reply_leaves_the_connection_open(proxy: Proxy, beyond: redis.Redis) -> None:
    proxy.swallow_reply(to="wanted")

    with pytest.raises(redis.TimeoutError):
        impatient(proxy).incr("wanted")

    assert beyond.get("wanted") == "1"


def test_a_delayed_reply_comes_later(proxy: Proxy, client: redis.Redis) -> None:
    proxy.delay_reply(to="wanted", seconds=0.1)

    sent = time.monotonic()
    assert client.incr("wanted") == 1
    assert time.monotonic() - sent >= 0.1
    assert client.incr("wanted") == 2


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
def test_connections_end_and_new_ones_are_taken(
    proxy: Proxy, client: redis.Redis, reset: bool
) -> None:
    waiting: list[Exception] = []

    def wait() -> None:
        try:
            client.blpop("nothing", timeout=5)
        except redis.ConnectionError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not proxy.requests_with("BLPOP"):
        time.sleep(0.001)
    assert (proxy.reset if reset else proxy.cut)() == 1
    thread.join()

    (error,) = waiting
    assert ("reset by peer" in str(error)) == reset
    assert client.ping()


def test_it_refuses_until_healed(proxy: Proxy, client: redis.Redis) -> None:
    assert proxy.refuse() == 1
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        impatient(proxy).ping()
    proxy.refuse()

    proxy.heal()
    assert client.ping()


def test_a_black_hole_takes_everything_and_healed_gives_it_back(
    proxy: Proxy, client: redis.Redis, beyond: redis.Redis
) -> None:
    proxy.black_hole()
    with pytest.raises(redis.TimeoutError):
        impatient(proxy).ping()
    before = len(proxy.requests)
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(client.incr("key")))
    thread.start()
    while len(proxy.requests) == before:
        time.sleep(0.001)
    assert beyond.get("key") is None

    proxy.heal()
    thread.join()
    assert answers == [1]
    assert beyond.get("key") == "1"


def test_a_stopped_one_is_gone(proxy: Proxy, client: redis.Redis) -> None:
    proxy.black_hole()
    proxy.stop()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    with pytest.raises(redis.ConnectionError, match="refused"):
        impatient(proxy).ping()
