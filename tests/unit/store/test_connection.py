"""Redis URLs in the form of Celery and kombu, and the clients that are created for them."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest
import redis.asyncio
from redis import Redis

from celery_idempotent.core.store.config import StoreConfig
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.core.store.server_info import distinct
from celery_idempotent.core.store.transport.connection import connect
from celery_idempotent.core.store.url import redacted
from celery_idempotent.errors import SettingsError


def connection_of(url: str) -> Any:
    """Return a connection for `url` that is not open."""
    return connect(StoreConfig(url=url)).connection_pool.make_connection()


@pytest.mark.parametrize(
    ("url", "host", "port", "database", "user", "password"),
    [
        ("redis://", "localhost", 6379, 0, None, None),
        ("redis:///3", "localhost", 6379, 3, None, None),
        ("redis://example.org", "example.org", 6379, 0, None, None),
        ("redis://example.org:7000/2", "example.org", 7000, 2, None, None),
        ("redis://example.org/?db=4", "example.org", 6379, 4, None, None),
        ("redis://:s%40cret@example.org/0", "example.org", 6379, 0, None, "s@cret"),
        ("redis://shop:secret@example.org", "example.org", 6379, 0, "shop", "secret"),
        ("redis://[::1]:7000", "::1", 7000, 0, None, None),
    ],
)
def test_tcp(
    url: str, host: str, port: int, database: int, user: str | None, password: str | None
) -> None:
    connection = connection_of(url)

    assert (connection.host, connection.port, connection.db) == (host, port, database)
    assert (connection.username, connection.password) == (user, password)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("ssl_cert_reqs=CERT_REQUIRED", ssl.CERT_REQUIRED),
        ("ssl_cert_reqs=CERT_OPTIONAL", ssl.CERT_OPTIONAL),
        ("ssl_cert_reqs=CERT_NONE", ssl.CERT_NONE),
        ("ssl_cert_reqs=required", ssl.CERT_REQUIRED),
        ("ssl_cert_reqs=none&ssl_ca_certs=%2Fetc%2Fca.pem", ssl.CERT_NONE),
        ("", ssl.CERT_REQUIRED),
    ],
)
def test_tls_in_celerys_form(query: str, wanted: ssl.VerifyMode) -> None:
    connection = connection_of(f"rediss://:secret@example.org:6380/1?{query}")

    assert connection.cert_reqs == wanted
    assert (connection.host, connection.port, connection.db) == ("example.org", 6380, 1)
    assert connection.ca_certs == ("/etc/ca.pem" if "ca_certs" in query else None)


@pytest.mark.parametrize(
    ("url", "database", "password"),
    [
        ("redis+socket:///run/redis.sock", 0, None),
        ("redis+socket:///run/redis.sock?virtual_host=3", 3, None),
        ("redis+socket:///run/redis.sock?virtual_host=/3", 3, None),
        ("redis+socket://:secret@/run/redis.sock?db=2", 2, "secret"),
        ("unix:///run/redis.sock?db=5", 5, None),
    ],
)
def test_unix_socket(url: str, database: int, password: str | None) -> None:
    connection = connection_of(url)

    assert connection.path == "/run/redis.sock"
    assert (connection.db, connection.password) == (database, password)


def test_default_timeouts_and_those_of_the_url() -> None:
    assert connection_of("redis://").socket_timeout == 2.5  # and a resend takes as long
    assert connection_of("redis://").socket_connect_timeout == 2
    assert connection_of("redis://?socket_timeout=0.5").socket_timeout == 0.5


def test_a_command_whose_reply_is_lost_is_resent() -> None:
    assert connection_of("redis://").retry.get_retries() == 1


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("amqp://guest:secret@localhost//", "amqp"),
        ("http://:secret@localhost", "http"),
        ("sqs://", "sqs"),
        ("REDIS://:secret@localhost", "REDIS"),
    ],
)
def test_an_unknown_scheme_is_an_error_that_lists_the_known_ones(url: str, scheme: str) -> None:
    with pytest.raises(SettingsError, match="idempotency_redis_url has the scheme") as caught:
        connect(StoreConfig(url=url))

    sentence = str(caught.value)
    assert repr(scheme) in sentence
    assert "redis, rediss, valkey, valkeys, redis+socket" in sentence
    assert "secret" not in sentence


@pytest.mark.parametrize(
    "url",
    [
        ":secret@localhost:6379/0",
        "localhost:secret",
        "redis://:sec/ret@localhost:6379/0",
        "redis://:secret@localhost:port/0",
        "redis://:secret@localhost:99999999/0",
        "redis://:secret@[::1/0",
        "redis://:secret@one:6379;redis://:secret@two:6379",
        "redis://:secret@localhost/0?socket_timeout=soon",
        "redis://:secret@localhost/0?nonesuch=secret",
        "rediss://:secret@localhost/0?ssl_cert_reqs=CERT_SECRET",
        "redis+socket:///run/redis.sock?virtual_host=secret",
    ],
)
def test_an_invalid_url_is_an_error_that_does_not_show_it(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        connect(StoreConfig(url=url))

    sentence = str(caught.value)
    assert "idempotency_redis_url" in sentence
    assert "\n" not in sentence
    for secret in ("secret", "SECRET", "'sec'", "ret@"):
        assert secret not in sentence
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://shop:secret@example.org:7000/2", "redis://example.org:7000/2"),
        ("redis://:secret@example.org/2?password=secret", "redis://example.org/2"),
        ("rediss://example.org", "rediss://example.org"),
        ("redis://", "redis://"),
        ("redis+socket://:secret@/run/redis.sock?virtual_host=3", "redis+socket:///run/redis.sock"),
        ("redis://:secret@[::1]:7000/0", "redis://[::1]:7000/0"),
        (
            "sentinel://:secret@one:26379/0;sentinel://:secret@two:26379/0",
            "sentinel://one:26379/0;sentinel://two:26379/0",
        ),
        ("redis+cluster://shop:secret@node:7000", "redis+cluster://node:7000"),
        (
            "redis+cluster://shop:secret@node:7000;redis+cluster://shop:secret@other:7001",
            "redis+cluster://node:7000;redis+cluster://other:7001",
        ),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown


class TestSentinels:
    URL = "sentinel://shop:s%40cret@one:1/3;sentinel://two;sentinel://:other@three:3/4"

    def master(self, url: str = URL, **options: Any) -> Any:
        return connect(StoreConfig(url=url, options={"master_name": "shop", **options}))

    def test_have_their_own_options(self) -> None:
        client = self.master(sentinel_kwargs={"password": "theirs"}, min_other_sentinels=1)

        manager = client.connection_pool.sentinel_manager
        (password,) = {s.connection_pool.connection_kwargs["password"] for s in manager.sentinels}
        assert (password, manager.min_other_sentinels) == ("theirs", 1)

    def test_can_use_tls_to_the_master(self) -> None:
        client = self.master(ssl=True, ssl_cert_reqs="none")

        assert "SSL" in client.connection_pool.connection_class.__name__

    def test_without_a_master_name_are_an_error(self) -> None:
        with pytest.raises(
            SettingsError, match="idempotency_redis_options must have the 'master_n"
        ):
            connect(StoreConfig(url=self.URL))

    @pytest.mark.parametrize("url", ["sentinel://one:port", "sentinel://one:1/secret"])
    def test_with_an_invalid_port_or_database_are_an_error(self, url: str) -> None:
        with pytest.raises(SettingsError, match="idempotency_redis_url is invalid"):
            self.master(url)


@pytest.mark.parametrize(
    ("client", "error"),
    [
        (dict, "idempotency_redis_client is a builtins.dict"),
        (Redis(decode_responses=True), "decode_responses"),
    ],
)
def test_a_client_of_the_user_that_cannot_be_used(client: Any, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        connect(StoreConfig(client=client))


@pytest.mark.parametrize(
    "url", ["redis://", "rediss://", "sentinel://one", "redis+cluster://one", "redis+socket:///run"]
)
def test_idle_connections_are_kept_alive(url: str) -> None:
    options = {"master_name": "shop"}
    client = connect(StoreConfig(url=url, options=options), library=redis.asyncio)
    pool = getattr(client, "connection_pool", None)
    kwargs = pool.connection_kwargs if pool else client.connection_kwargs
    idle = kwargs.get("socket_keepalive_options", {}).get(socket.TCP_KEEPIDLE)

    assert (kwargs.get("socket_keepalive"), idle) == (
        (None, None) if "socket" in url else (True, 30)
    )


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(SettingsError, match="idempotency_redis_options"):
        connect(StoreConfig(url="redis://", options={"nonesuch": "secret"}))


def test_the_config_does_not_show_secrets() -> None:
    config = StoreConfig(url="redis://:secret@host/0", options={"password": "secret"})

    assert "secret" not in f"{config} {config!r}"


SENTINELS = "sentinel://10.0.0.1;sentinel://10.0.0.2:26379/0"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("redis://", "redis://user:secret@127.0.0.1:6379/0?socket_timeout=1", True),
        ("redis://a/2", "rediss://A/?db=2", True),
        ("redis+socket:///run/redis.sock?virtual_host=1", "unix:///run/redis.sock?db=1", True),
        (SENTINELS, "sentinel://10.0.0.2;sentinel://10.0.0.1", True),
        (SENTINELS, "sentinel://10.0.0.1/1;sentinel://10.0.0.2", False),
        ("redis://a", "redis://b", False),
        ("redis://a:6379", "redis://a:6380", False),
        ("redis://a/0", "redis://a/1", False),
        ("redis://127.0.0.1", "unix:///run/redis.sock", False),
        ("redis+cluster://127.0.0.1:1", "redis+cluster://127.0.0.1:1", True),  # unavailable
        ("redis+cluster://127.0.0.1:1", "redis+cluster://127.0.0.1:2", False),
    ],
)
def test_the_location_of_records_is_the_same_in_every_spelling(
    one: str, other: str, same: bool
) -> None:
    options = {"master_name": "records"}
    stores = [RecordStore(StoreConfig(url=url, options=options), repr) for url in (one, other)]

    assert len(distinct(stores)) == (1 if same else 2)
    stores[1] = RecordStore(StoreConfig(url=one, options=options, prefix="other"), repr)
    assert len(distinct(stores)) == 2
