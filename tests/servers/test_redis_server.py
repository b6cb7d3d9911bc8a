"""Tests of `RedisServer` with every server program on this machine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeoutError

from tests.apps import close
from tests.exhaustive import exhaustive_except
from tests.servers.program import is_running
from tests.servers.redis_server import (
    RedisServer,
    find_servers,
)
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
def test_listens_on_loopback_only(kind: str) -> None:
    with RedisServer.start(kind) as server:
        assert server.client().config_get("bind")["bind"] == "127.0.0.1"


@each_kind
def test_restart_keeps_the_url_and_durable_data(kind: str) -> None:
    with RedisServer.start(kind, config={"appendonly": "yes"}) as server:
        server.client().set("key", "value")
        url = server.url
        for stop in (server.restart, server.kill):
            stop()
            server.restart()
            assert server.url == url
            assert server.client().get("key") == b"value"


def test_a_killed_server_refuses_connections_until_restarted() -> None:
    with RedisServer.start() as server:
        server.kill()
        with pytest.raises(redis.ConnectionError):
            server.client().ping()
        server.restart()
        assert server.client().ping()


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
