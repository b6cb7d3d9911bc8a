"""The Redis that holds the records of a task."""

from __future__ import annotations

from ssl import CERT_NONE, CERT_REQUIRED
from typing import Any

import kombu.transport
import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from redis import CredentialProvider, Redis, SSLConnection

from tests.unit.conftest import celery, task_in

PROVIDER = f"{__name__}:Provider"


class Provider(CredentialProvider):
    """Credentials that a user's code returns."""

    def get_credentials(self) -> tuple[str]:
        return ("secret",)


def store_of(settings: dict[str, Any], **attributes: Any) -> Any:
    """Returns the store of a task in an app with these settings."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return task_in(app, **attributes).idempotency_configuration.executor.store


def options_of(**settings: Any) -> dict[str, Any]:
    """Returns the options of the connections to the records of an app with these settings."""
    pool = store_of(settings).client.connection_pool
    options = dict(pool.connection_kwargs, connection_class=pool.connection_class)
    if manager := getattr(pool, "sentinel_manager", None):
        addresses = [s.connection_pool.connection_kwargs for s in manager.sentinels]
        options["sentinels"] = [(each["host"], each["port"]) for each in addresses]
        options["min_other_sentinels"] = manager.min_other_sentinels
    return options


SSL = {"ssl_ca_certs": "/etc/ca.pem", "ssl_cert_reqs": CERT_REQUIRED}


class TestRedis:
    @pytest.mark.parametrize(
        ("settings", "config"),
        [
            ({"idempotency_redis_url": "redis://own:1/5"}, "redis://own:1/5"),
            ({}, "redis://backend:1/0"),
            ({"result_backend": "rpc://"}, "redis://broker:1/0"),
            ({"result_backend": None}, "redis://broker:1/0"),
            ({"result_backend": "file:///tmp"}, "redis://broker:1/0"),
        ],
        ids=["own", "backend", "rpc", "none", "file"],
    )
    def test_is_the_own_one_or_celerys(self, settings: dict[str, Any], config: str) -> None:
        both = {"broker_url": "redis://broker:1/0", "result_backend": "redis://:pw@backend:1/0"}

        assert str(store_of(both | settings).config) == config

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (
                {"result_backend": "redis", "redis_host": "shop", "redis_port": 1, "redis_db": 2},
                {"host": "shop", "port": 1, "db": 2},
            ),
            (
                {"result_backend": "redis://shop/3", "redis_username": "u", "redis_password": "p"},
                {"host": "shop", "db": 3, "username": "u", "password": "p"},
            ),
            ({"result_backend": "redis://:p%2F@[::1]:7/1"}, {"host": "::1", "password": "p/"}),
            (
                {"result_backend": "redis+socket:///run/redis?virtual_host=4"},
                {"path": "/run/redis", "db": 4},
            ),
            (
                {"result_backend": "redis://shop", "redis_backend_use_ssl": SSL},
                {**SSL, "connection_class": SSLConnection},
            ),
            ({"result_backend": "rediss://shop?ssl_cert_reqs=none"}, {"ssl_cert_reqs": CERT_NONE}),
            (
                {
                    "result_backend": "sentinel://u:p@one:1/3;sentinel://two:2",
                    "result_backend_transport_options": {
                        "master_name": "shop", "min_other_sentinels": 1, "visibility_timeout": 5,
                    },
                },
                {"sentinels": [("one", 1), ("two", 2)], "min_other_sentinels": 1, "db": 3,
                 "username": "u", "password": "p"},
            ),
            (
                {"idempotency_redis_url": "sentinel://u:p%40@one:1/3;sentinel://two",
                 "idempotency_redis_options": {"master_name": "shop"}},
                {"sentinels": [("one", 1), ("two", 26379)], "db": 3,
                 "username": "u", "password": "p@"},
            ),
            ({"idempotency_redis_url": "valkeys://shop/2"},
             {"host": "shop", "db": 2, "connection_class": SSLConnection}),
            ({"result_backend": "rpc://", "broker_url": "redis://:p%2F@[::1]:7/1"},
             {"host": "::1", "port": 7, "password": "p/", "db": 1}),
            (
                {"broker_url": "redis://shop", "broker_user": "u", "broker_password": "p",
                 "broker_vhost": "9", "broker_port": 5},
                {"host": "shop", "port": 5, "username": "u", "password": "p", "db": 9},
            ),
            (
                {"broker_host": "shop", "broker_transport": "redis", "broker_vhost": "4"},
                {"host": "shop", "db": 4},
            ),
            ({"broker_url": "valkey://shop/2"}, {"host": "shop", "port": 6379, "db": 2}),
            ({"broker_url": "redis+socket:///run/redis?virtual_host=4"},
             {"path": "/run/redis", "db": 4}),
            ({"broker_url": "redis://shop", "broker_use_ssl": SSL,
              "broker_transport_options": {"socket_keepalive": True, "sep": ":"}},
             {**SSL, "connection_class": SSLConnection, "socket_keepalive": True}),
            ({"broker_url": "rediss://shop"}, {"ssl_cert_reqs": CERT_NONE}),
            (
                {"broker_url": ["sentinel://:p@one:1/3", "sentinel://two"],
                 "broker_transport_options": {"master_name": "shop"}},
                {"sentinels": [("one", 1), ("two", 26379)], "db": 3, "password": "p"},
            ),
        ],
    )  # fmt: skip
    def test_is_connected_to_as_celery_does(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        aliases = kombu.transport.TRANSPORT_ALIASES  # other packages add them
        monkeypatch.setitem(aliases, "valkey", "kombu.transport.redis:Transport")
        options = options_of(**settings)

        assert {name: options[name] for name in expected} == expected

    @pytest.mark.parametrize(
        "settings",
        [
            {"result_backend": f"redis://u:p@shop?credential_provider={PROVIDER}"},
            {"result_backend": "redis://", "redis_backend_credential_provider": PROVIDER},
            {"broker_url": f"redis://u:p@shop?credential_provider={PROVIDER}"},
            {"broker_url": f"redis+socket:///run/redis?credential_provider={PROVIDER}"},
            {"idempotency_redis_url": f"redis://shop?credential_provider={PROVIDER}"},
            {
                "idempotency_redis_url": "redis://shop",
                "idempotency_redis_options": {"credential_provider": PROVIDER},
            },
        ],
    )
    def test_gets_the_credentials_of_a_provider(self, settings: dict[str, Any]) -> None:
        options = options_of(**settings)

        assert options["credential_provider"].get_credentials() == ("secret",)
        assert not options.get("username")
        assert not options.get("password")

    @pytest.mark.parametrize(
        ("settings", "error"),
        [
            ({"broker_url": "redis://:p@one;redis://two"}, "broker_url lists several servers"),
            ({"broker_url": ["redis://:p@one", "redis://two"]}, "broker_url lists several servers"),
            ({"broker_url": "redis://one?nonesuch=p"}, "broker_url cannot be used"),
            ({"result_backend": "redis://:p@one?nonesuch=1"}, "nonesuch"),
            ({"idempotency_redis_url": "redis://u:p@one:p"}, "idempotency_redis_url is invalid"),
            ({"result_backend": "redis://u:p@one:p"}, "result_backend cannot be used"),
            ({"broker_url": "redis://u:p@one:p"}, "broker_url cannot be used"),
            ({"broker_url": "sentinel://u:p@one;sentinel://u:p@two:p"}, "broker_url has"),
            ({"broker_url": "redis://u:p@one/p"}, "broker_url has"),
            ({"result_backend": "valkey://:p@one"}, "for Valkey write redis://"),
            (
                {"idempotency_redis_url": "redis://?credential_provider=nonesuch.p"},
                "credential_provider",
            ),
        ],
    )
    def test_that_cannot_be_used_is_refused(self, settings: dict[str, Any], error: str) -> None:
        with pytest.raises(ImproperlyConfigured, match=error) as caught:
            options_of(**settings)
        assert ":p" not in str(caught.value)

    def test_that_is_configured_gets_no_options_of_others(self) -> None:
        settings = {
            "result_backend": "redis://backend",
            "redis_backend_use_ssl": {"ssl_ca_certs": "/etc/ca.pem"},
            "idempotency_redis_url": "redis://own",
            "idempotency_redis_options": {"username": "shop"},
        }

        config = store_of(settings).config

        assert (config.url, config.options) == ("redis://own", {"username": "shop"})

    def test_may_be_a_custom_client(self) -> None:
        client = Redis()
        store = store_of({}, idempotency_redis_client=lambda: client)

        assert store.client is client
        assert str(store.config) == "function given by the user"
        assert isinstance(store_of({}, idempotency_redis_client="redis:Redis").client, Redis)

    def test_with_an_invalid_import_path_is_rejected(self) -> None:
        with pytest.raises(ImproperlyConfigured, match="'shop.nowhere:client' cannot be imported"):
            store_of({}, idempotency_redis_client="shop.nowhere:client")

    def test_that_is_not_configured_is_an_error(self) -> None:
        settings = {"broker_url": "amqp://guest:secret@localhost//", "result_backend": "rpc://"}

        with pytest.raises(ImproperlyConfigured) as caught:
            store_of(settings)

        assert str(caught.value) == (
            "idempotency_redis_url is not set, and neither the result backend nor the broker is "
            "Redis: set it to the URL of the Redis server for the records"
        )

    def test_is_shared_by_the_tasks_of_an_app(self) -> None:
        app = celery()
        one = task_in(app)
        two = task_in(app, name="shop.refund")
        other = task_in(app, name="shop.ship", idempotency_key_prefix="ship")

        executors = [task.idempotency_configuration.executor for task in (one, two, other)]

        assert executors[0] is executors[1]
        assert executors[0] is not executors[2]
        assert task_in(celery()).idempotency_configuration.executor is not executors[0]

    def test_is_not_required_by_an_unprotected_task(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(broker_url="memory://", idempotency_enabled=False, task_always_eager=True)

        def increment(number: int) -> int:
            return number + 1

        assert task_in(app, increment).delay(1).get() == 2
