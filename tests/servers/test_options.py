"""Tests of `RedisServer`: TLS, users, replication, an own clock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import redis

from tests.servers import clock, redis_server, waiting
from tests.servers.certificate import Certificate
from tests.servers.program import ServerError
from tests.servers.redis_server import RedisServer, RedisServerError, find_servers, has_tls

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


def test_tls_with_a_server_that_has_none_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    without_tls = [kind for kind, program in find_servers().items() if not has_tls(program)]
    for kind in without_tls:
        with pytest.raises(RedisServerError, match=f"No {kind} server with TLS here"):
            RedisServer.start(kind, tls=True)

    monkeypatch.setattr(redis_server, "has_tls", lambda path: False)
    with pytest.raises(RedisServerError, match="apt-get install redis-server"):
        RedisServer.start(tls=True)


def test_a_program_that_cannot_be_executed_has_no_tls(tmp_path: Path) -> None:
    assert not has_tls(tmp_path / "redis-server")


@needs_tls
def test_tls_needs_trustme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerError, match="pip install trustme"):
        RedisServer.start(tls=True)
    assert not list(tmp_path.iterdir())


def test_the_url_contains_the_password() -> None:
    with RedisServer.start(password="s3cret/@:") as server:
        assert server.client().ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.port, retry=None).ping()

        server.restart()
        assert server.client().ping()


@pytest.mark.parametrize("unix_socket", [False, True], ids=["tcp", "socket"])
def test_users_have_the_rights_of_their_rules(unix_socket: bool) -> None:
    rules = {"shop": "on >s3cret ~idem:* +get +set"}
    with RedisServer.start(users=rules, unix_socket=unix_socket) as server:
        assert server.client().set("anything", "1")

        url = server.url_as("shop", "s3cret").replace("redis+socket", "unix")
        with redis.Redis.from_url(url) as shop:
            assert shop.set("idem:key", "1")
            for command in (lambda: shop.get("anything"), lambda: shop.delete("idem:key")):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    command()


@pytest.mark.parametrize("password", [None, "s3cret/@:"], ids=["open", "password"])
def test_a_replica_copies_its_master(password: str | None) -> None:
    with RedisServer.start(password=password) as master:
        master.client().set("key", "first")
        with RedisServer.start(password=password, replica_of=master) as replica:
            assert replica.client().get("key") == b"first"
            with pytest.raises(redis.ReadOnlyError):
                replica.client().set("key", "mine")

            replica.kill()
            master.client().set("key", "second")
            replica.restart(replica_of=master)
            assert replica.client().get("key") == b"second"
            assert not master.is_copy_of(replica)


def test_a_replica_that_cannot_copy_its_master_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer.start(password="s3cret") as master:
        monkeypatch.setattr(
            redis_server,
            "_replication_directives",
            lambda master: {"replicaof": f"127.0.0.1 {master.port}"},
        )
        monkeypatch.setattr(waiting, "WAIT_SECONDS", 0.1)
        with pytest.raises(ServerError, match=r"did not get the master's data within 0\.1 s"):
            RedisServer.start(replica_of=master)


def seconds_of(client: redis.Redis) -> float:
    seconds, microseconds = client.time()
    return seconds + microseconds / 1e6


@needs_clock
def test_an_own_clock_can_be_stepped() -> None:
    with (
        RedisServer.start(clock=True) as server,
        RedisServer.start() as other,
    ):
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


@needs_clock
def test_a_script_reads_the_stepped_clock() -> None:
    with RedisServer.start(clock=True) as server:
        script = "return redis.call('TIME')[1]"
        before = int(server.client().eval(script, 0))
        server.step_clock(0.5 + 1000)
        assert 999 < int(server.client().eval(script, 0)) - before < 1010


def test_stepping_the_machines_clock_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        RedisServer.start() as server,
        pytest.raises(RedisServerError, match="clock=True"),
    ):
        server.step_clock(1)

    monkeypatch.setattr(clock, "_DIRECTORIES", ("nowhere",))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerError, match="apt-get install libfaketime"):
        RedisServer.start(clock=True)
    assert not list(tmp_path.iterdir())


def test_a_certificate_is_written_as_pem_files(tmp_path: Path) -> None:
    certificate = Certificate.make(tmp_path)
    for path in (certificate.authority, certificate.chain, certificate.key):
        assert path.read_text().startswith("-----BEGIN ")
