"""The Redis that holds the records of a task."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from redis import Redis

from tests.unit.conftest import celery, task_in


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
    def test_is_the_configured_one_or_the_backend_or_the_broker(
        self, settings: dict[str, Any], config: str
    ) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            {"broker_url": "redis://broker:1/0", "result_backend": "redis://:pw@backend:1/0"}
            | settings
        )

        assert str(task_in(app).idempotency_configuration.executor.store.config) == config

    def test_gets_the_connection_options_of_the_result_backend(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            result_backend="sentinel://one:1/0;sentinel://two:2/0",
            result_backend_transport_options={"master_name": "shop", "visibility_timeout": 5},
            redis_backend_use_ssl={"ssl_ca_certs": "/etc/ca.pem"},
        )

        config = task_in(app).idempotency_configuration.executor.store.config

        assert config.url == "sentinel://one:1/0;sentinel://two:2/0"
        assert config.options == {
            "master_name": "shop", "ssl": True, "ssl_ca_certs": "/etc/ca.pem",
        }  # fmt: skip

    @pytest.mark.parametrize("tls", [True, {"ssl_ca_certs": "/etc/ca.pem"}])
    def test_gets_the_connection_options_of_the_broker(self, tls: Any) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            broker_url="redis://:pw@broker:1/0",
            broker_use_ssl=tls,
            broker_transport_options={"socket_keepalive": True, "queue_order_strategy": "sorted"},
        )

        config = task_in(app).idempotency_configuration.executor.store.config

        assert config.url == "rediss://:pw@broker:1/0"
        assert config.options == {"socket_keepalive": True} | (tls if tls is not True else {})

    def test_that_is_configured_gets_no_options_of_others(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(
            result_backend="redis://backend",
            redis_backend_use_ssl={"ssl_ca_certs": "/etc/ca.pem"},
            idempotency_redis_url="redis://own",
            idempotency_redis_options={"username": "shop"},
        )

        config = task_in(app).idempotency_configuration.executor.store.config

        assert (config.url, config.options) == ("redis://own", {"username": "shop"})

    def test_may_be_a_custom_client(self) -> None:
        client = Redis()
        task = task_in(celery(), idempotency_redis_client=lambda: client)

        store = task.idempotency_configuration.executor.store

        assert store.client is client
        assert str(store.config) == "function given by the user"

    def test_may_be_the_import_path_of_a_client(self) -> None:
        task = task_in(celery(), idempotency_redis_client="redis:Redis")

        assert isinstance(task.idempotency_configuration.executor.store.client, Redis)

    def test_with_an_invalid_import_path_is_rejected(self) -> None:
        task = task_in(celery(), idempotency_redis_client="shop.nowhere:client")

        with pytest.raises(ImproperlyConfigured, match="'shop.nowhere:client' cannot be imported"):
            task.idempotency_record(1)

    def test_that_is_not_configured_is_an_error(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.conf.update(broker_url="amqp://guest:secret@localhost//", result_backend="rpc://")
        task = task_in(app)

        with pytest.raises(ImproperlyConfigured) as caught:
            task.idempotency_record(1)

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
