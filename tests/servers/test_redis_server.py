"""Tests of `RedisServer` with every server program on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeoutError

from tests.apps import close
from tests.conftest import exhaustive_except
from tests.servers.program import is_running
from tests.servers.redis_server import RedisServer, find_servers
from tests.waiting import eventually

KINDS = list(find_servers())
each_kind = pytest.mark.parametrize("kind", exhaustive_except(KINDS, *KINDS[:1]))


def directory_of(server: RedisServer) -> Path:
    return Path(server.client().config_get("dir")["dir"])


@each_kind
@pytest.mark.parametrize("unix_socket", [False, True], ids=["tcp", "socket"])
def test_starts_replies_and_is_removed_by_stop(kind: str, unix_socket: bool) -> None:
    with RedisServer.start(kind, unix_socket=unix_socket) as server:
        client = server.client()
        assert client.ping()
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        assert server.flavour in ("redis", "valkey")
        assert int(server.version.split(".")[0]) >= 6
        directory = directory_of(server)
        pid = client.info("server")["process_id"]

    assert not is_running(pid)
    assert not directory.exists()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.stop()


@each_kind
def test_restart_keeps_the_url_and_durable_data(kind: str) -> None:
    with RedisServer.start(kind, config={"appendonly": "yes"}) as server:
        server.client().set("key", "value")
        url = server.url
        for stop in (server.restart, server.kill):
            stop()
            if stop == server.kill:
                with pytest.raises(redis.ConnectionError):
                    server.client().ping()
            server.restart()
            assert server.url == url
            assert server.client().get("key") == b"value"


def test_a_paused_server_replies_after_resume() -> None:
    with RedisServer.start() as server:
        server.pause()
        with pytest.raises(redis.TimeoutError):
            server.client(socket_timeout=0.1, retry=None).ping()
        server.resume()
        assert server.client().ping()


def test_outlives_the_thread_that_started_it() -> None:
    servers: list[RedisServer] = []
    thread = threading.Thread(target=lambda: servers.append(RedisServer.start()))
    thread.start()
    thread.join()
    with servers[0] as server:
        pid = server.client().info("server")["process_id"]
        with pytest.raises(TimeoutError):
            eventually(lambda: not is_running(pid), "it ends", seconds=0.2)


@pytest.mark.exhaustive
def test_results_of_a_closed_app_are_collected_without_their_server() -> None:
    with RedisServer.start() as server:
        app = Celery(broker="memory://", backend=server.url, set_as_current=False)
        results = [app.send_task("absent", queue="no worker") for _ in range(2)]
        for result in results:
            with pytest.raises(CeleryTimeoutError):
                result.get(timeout=0.01)
        close(app)

    for result in results:
        result.__del__()  # without `close`, the second one raises after twenty seconds


needs_tls = pytest.mark.tls
needs_clock = pytest.mark.clock


@needs_tls
def test_tls_clients_must_trust_the_servers_authority() -> None:
    with RedisServer.start(tls=True) as server:
        assert server.url.startswith("rediss://127.0.0.1:")
        assert server.client().ping()
        assert server.client(db=1).connection_pool.connection_kwargs["db"] == 1

        bare = server.url.partition("?")[0]
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            redis.Redis.from_url(bare, retry=None).ping()
        with pytest.raises(redis.ConnectionError):
            redis.Redis.from_url(bare.replace("rediss", "redis"), retry=None).ping()

        server.restart()
        assert server.client().ping()


def seconds_of(client: redis.Redis) -> float:
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


@needs_clock
def test_an_own_clock_can_be_stepped() -> None:
    with RedisServer.start(clock=True) as server, RedisServer.start() as other:
        client = server.client()
        client.set("key", "value", ex=60)
        before = seconds_of(other.client())
        assert abs(seconds_of(client) - before) < 5

        server.step_clock(-30)
        assert abs(seconds_of(client) - before + 30) < 5
        assert 85 < client.ttl("key") <= 90
        server.step_clock(100)
        assert abs(seconds_of(client) - before - 70) < 5
        assert client.get("key") is None

        server.restart()
        assert abs(seconds_of(server.client()) - before - 70) < 5
        assert abs(seconds_of(other.client()) - before) < 5
        assert not list(Path("/dev/shm").glob(f"*faketime_s*_{client.info()['process_id']}"))
