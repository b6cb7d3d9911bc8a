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

ORG, TLS, SOCKET = {"host": "example.org"}, "rediss://:secret@example.org:6380/1", "/run/redis.sock"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://", {"username": None, "password": None, "socket_connect_timeout": 2}),
        ("redis://", {"socket_timeout": 2.5}),  # and a resend takes as long
        ("redis://?socket_timeout=0.5", {"socket_timeout": 0.5}),
        ("redis:///3", {"host": "localhost", "db": 3}),
        ("redis://example.org", {**ORG, "port": 6379, "db": 0}),
        ("redis://example.org:7000/2", {**ORG, "port": 7000, "db": 2}),
        ("redis://example.org/?db=4", {**ORG, "db": 4}),
        ("redis://:s%40cret@example.org/0", {**ORG, "username": None, "password": "s@cret"}),
        ("redis://shop:secret@example.org", {**ORG, "username": "shop", "password": "secret"}),
        ("redis://[::1]:7000", {"host": "::1", "port": 7000, "db": 0}),
        (TLS, {**ORG, "port": 6380, "db": 1, "cert_reqs": ssl.CERT_REQUIRED, "ca_certs": None}),
        (f"{TLS}?ssl_cert_reqs=CERT_REQUIRED", {"cert_reqs": ssl.CERT_REQUIRED, "port": 6380}),
        (f"{TLS}?ssl_cert_reqs=CERT_OPTIONAL", {"cert_reqs": ssl.CERT_OPTIONAL}),
        (f"{TLS}?ssl_cert_reqs=CERT_NONE", {"cert_reqs": ssl.CERT_NONE}),
        (f"{TLS}?ssl_cert_reqs=required", {"cert_reqs": ssl.CERT_REQUIRED}),
        (
            f"{TLS}?ssl_cert_reqs=none&ssl_ca_certs=%2Fetc%2Fca.pem",
            {"cert_reqs": ssl.CERT_NONE, "ca_certs": "/etc/ca.pem"},
        ),
        (f"redis+socket://{SOCKET}", {"path": SOCKET, "db": 0, "password": None}),
        (f"redis+socket://{SOCKET}?virtual_host=3", {"path": SOCKET, "db": 3}),
        (f"redis+socket://{SOCKET}?virtual_host=/3", {"path": SOCKET, "db": 3}),
        (f"redis+socket://:secret@{SOCKET}?db=2", {"path": SOCKET, "db": 2, "password": "secret"}),
        (f"unix://{SOCKET}?db=5", {"path": SOCKET, "db": 5}),
    ],
)
def test_a_url_is_read_as_by_celery(url: str, expected: dict[str, Any]) -> None:
    connection = connect(StoreConfig(url=url)).connection_pool.make_connection()

    assert {name: getattr(connection, name) for name in expected} == expected
    assert connection.retry.get_retries() == 1, "a command whose reply is lost is resent"


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
        with pytest.raises(SettingsError, match="idempotency_redis_options must have the 'maste"):
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

    expected = (None, None) if "socket" in url else (True, 30)
    assert (kwargs.get("socket_keepalive"), idle) == expected


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
def test_a_location_is_the_same_in_every_spelling(one: str, other: str, same: bool) -> None:
    options = {"master_name": "records"}
    stores = [RecordStore(StoreConfig(url=url, options=options), repr) for url in (one, other)]

    assert len(distinct(stores)) == (1 if same else 2)
    stores[1] = RecordStore(StoreConfig(url=one, options=options, prefix="other"), repr)
    assert len(distinct(stores)) == 2
