"""Options read from a real Celery app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured
from kombu import serialization
from redis import Redis

from celery_idempotent import TASK_ID, IdempotentTask
from celery_idempotent.settings import OPTIONS, Settings


def celery(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(broker_url="memory://", result_backend="redis://localhost:1/0", **settings)
    return app


def charge(order_id: Any, amount: Any = 0) -> None: ...


async def coroutine(order_id: Any) -> None: ...


def generator(order_id: Any) -> Iterator[Any]:
    yield order_id


async def async_generator(order_id: Any) -> AsyncIterator[Any]:
    yield order_id


def task_in(
    app: Celery,
    function: Callable[..., Any] = charge,
    *,
    name: str = "shop.charge",
    base: type[IdempotentTask] = IdempotentTask,
    **attributes: Any,
) -> IdempotentTask:
    task: IdempotentTask = app.task(
        function, base=base, name=name, lazy=False, shared=False, **attributes
    )
    return task


def settings_of(app: Celery, **attributes: Any) -> Settings:
    return task_in(app, **attributes).idempotency_configuration.settings


def error_of(app: Celery, **attributes: Any) -> str:
    """Returns the error message in one line."""
    with pytest.raises(ImproperlyConfigured) as caught:
        settings_of(app, **attributes)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
    return str(caught.value)


class TestSourcesOfOptions:
    def test_defaults(self) -> None:
        assert settings_of(celery()) == Settings(serializer="json")

    def test_plain_settings(self) -> None:
        assert settings_of(celery(idempotency_lease=7, idempotency_enabled=False)) == Settings(
            lease=7, enabled=False, serializer="json"
        )

    def test_a_module(self) -> None:
        module = ModuleType("celeryconfig")
        module.idempotency_lease = 7  # type: ignore[attr-defined]
        app = Celery("shop", set_as_current=False)
        app.config_from_object(module)

        assert settings_of(app).lease == 7

    def test_django_settings(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.config_from_object(
            SimpleNamespace(
                CELERY_IDEMPOTENCY_LEASE=7,
                CELERY_IDEMPOTENCY_ON_CONFLICT="raise",
                CELERY_TASK_SERIALIZER="json",
                SECRET_KEY="secret",
                INSTALLED_APPS=[],
            ),
            namespace="CELERY",
        )

        settings = settings_of(app)

        assert (settings.lease, settings.on_conflict) == (7, "raise")

    def test_attributes_override_settings(self) -> None:
        app = celery(idempotency_lease=7, idempotency_store_result=True, idempotency_wait_timeout=9)

        settings = settings_of(
            app, idempotency_lease=8, idempotency_store_result=False, idempotency_wait_timeout=0
        )

        assert (settings.lease, settings.store_result, settings.wait_timeout) == (8, False, 0)

    def test_an_attribute_that_is_none_means_the_setting(self) -> None:
        assert settings_of(celery(idempotency_lease=7), idempotency_lease=None).lease == 7

    def test_a_custom_base_class(self) -> None:
        class Careful(IdempotentTask):
            abstract = True
            idempotency_lease = 8
            idempotency_key = TASK_ID

        settings = settings_of(celery(idempotency_lease=7), base=Careful)

        assert (settings.lease, settings.key) == (8, TASK_ID)

    def test_every_option_is_an_attribute_of_the_task(self) -> None:
        assert all(hasattr(IdempotentTask, option) for option in OPTIONS)
        assert all(getattr(IdempotentTask, option) is None for option in OPTIONS)


class TestInvalidOptions:
    def test_an_invalid_setting(self) -> None:
        assert error_of(celery(idempotency_lease="60")).startswith(
            "shop.charge: idempotency_lease must be a number of seconds"
        )

    def test_an_invalid_attribute(self) -> None:
        assert error_of(celery(), idempotency_max_attempts=0).startswith(
            "shop.charge: idempotency_max_attempts must be a whole number"
        )

    def test_an_unknown_setting(self) -> None:
        assert error_of(celery(idempotency_leese=5)) == (
            "the Celery configuration: there is no option idempotency_leese; "
            "did you mean idempotency_lease?"
        )

    def test_an_unknown_attribute(self) -> None:
        assert error_of(celery(), idempotency_leese=5) == (
            "shop.charge: there is no option idempotency_leese; did you mean idempotency_lease?"
        )

    def test_an_unknown_django_setting(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.config_from_object(SimpleNamespace(CELERY_IDEMPOTENCY_LEESE=7), namespace="CELERY")

        assert "there is no option idempotency_leese; did you mean" in error_of(app)

    def test_a_django_setting_of_another_library_is_accepted(self) -> None:
        app = Celery("shop", set_as_current=False)
        app.config_from_object(
            SimpleNamespace(IDEMPOTENCY_HEADER_NAME="Idempotency-Key", CELERY_IDEMPOTENCY_LEASE=7),
            namespace="CELERY",
        )

        assert settings_of(app).lease == 7

    def test_a_template_with_an_unknown_argument(self) -> None:
        assert error_of(celery(), idempotency_key="order:{id}") == (
            "shop.charge: idempotency_key names 'id', which the task does not take "
            "(it takes: order_id, amount)"
        )

    def test_a_template_with_self(self) -> None:
        def bound(self: Any, order_id: Any) -> None: ...

        with pytest.raises(ImproperlyConfigured, match=r"names 'self'.*takes: order_id\)"):
            task_in(celery(), bound, bind=True, idempotency_key="{self.name}")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"idempotency_serializer": "jason"},
                "shop.charge: idempotency_serializer: kombu has no serializer 'jason'",
            ),
            (
                {"idempotency_compression": "zip"},
                "shop.charge: idempotency_compression: kombu has no compression 'zip'",
            ),
            (
                {"idempotency_serializer": "pickle"},
                (
                    "shop.charge: idempotency_serializer 'pickle' writes a content type that is "
                    "not in result_accept_content (or accept_content): add it there, or set "
                    "another serializer"
                ),
            ),
        ],
        ids=["serializer", "compression", "content-type"],
    )
    def test_a_serializer_or_compression_that_cannot_be_used(
        self, options: dict[str, Any], message: str
    ) -> None:
        assert error_of(celery(**options)) == message
        assert error_of(celery(), **options) == message

    @pytest.mark.parametrize("compression", ["gzip", "zlib", "bzip2", "application/x-gzip"])
    def test_every_name_of_a_compression_is_accepted(self, compression: str) -> None:
        settings = settings_of(celery(idempotency_compression=compression))

        assert settings.compression == compression

    def test_a_serializer_whose_package_is_missing(self) -> None:
        def not_installed(*_: Any) -> None:
            raise ImportError("no module named broken")

        serialization.register("broken", not_installed, not_installed, "application/x-broken")
        try:
            message = error_of(celery(), idempotency_serializer="broken")
        finally:
            serialization.unregister("broken")
        assert "idempotency_serializer 'broken' cannot be used here" in message
        assert "no module named broken" in message

    def test_an_offload_backend_that_is_not_a_key_value_backend(self) -> None:
        for url in ("rpc://:secret@localhost", "nonesuch://:secret@localhost", "secret"):
            message = error_of(celery(), idempotency_offload_backend=url)
            assert "idempotency_offload_backend" in message

    @pytest.mark.parametrize(
        "url",
        ["http://:secret@localhost", ":secret@localhost:6379", "redis://:secret@localhost:port"],
    )
    def test_a_url_that_is_not_of_redis(self, url: str) -> None:
        task = task_in(celery(), idempotency_redis_url=url)

        with pytest.raises(ImproperlyConfigured, match="idempotency_redis_url") as caught:
            _ = task.idempotency_configuration.executor
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("body", [coroutine, generator, async_generator])
    def test_a_body_that_returns_before_it_has_run(self, body: Callable[..., Any]) -> None:
        assert error_of(celery(), function=body).startswith("shop.charge is a")

        settings_of(celery(idempotency_enabled=False), function=body)

    def test_a_call_method_that_skips_idempotency(self) -> None:
        """As in Flask's documentation, to open a context around the body."""

        class InContext(Task):
            abstract = True

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                with nullcontext():
                    return self.run(*args, **kwargs)

        class SkipsIdempotency(InContext, IdempotentTask):
            abstract = True

        assert error_of(celery(), base=SkipsIdempotency) == (
            "shop.charge: InContext.__call__ calls self.run, which skips idempotency: call "
            "super().__call__ instead"
        )
        settings_of(celery(idempotency_enabled=False), base=SkipsIdempotency)

    def test_a_body_that_calls_run_is_accepted(self) -> None:
        def runs(order_id: Any) -> Any:
            return order_id.run()

        settings_of(celery(), function=runs)

    def test_a_call_method_that_calls_the_inherited_one_is_accepted(self) -> None:
        class Wrapped(IdempotentTask):
            abstract = True

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                with nullcontext(self.run):
                    return super().__call__(*args, **kwargs)

        settings_of(celery(), base=Wrapped)

    def test_are_rejected_when_the_app_is_finalised(self) -> None:
        app = celery(idempotency_lease=-1)
        app.task(charge, base=IdempotentTask, name="shop.charge", shared=False)

        with pytest.raises(ImproperlyConfigured, match="idempotency_lease"):
            app.finalize()


KEY = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IHNlY3I="

key_requests: list[None] = []


def keys() -> tuple[str, ...]:
    key_requests.append(None)
    return (KEY,)


def keys_of_an_unavailable_vault() -> tuple[str, ...]:
    raise OSError("secret vault is not available")


class TestEncryptionKeys:
    """Results are encrypted with them, and no error message shows them."""

    @pytest.mark.parametrize(
        "given",
        [(KEY,), [KEY.encode()], keys, f"{__name__}.keys", f"{__name__}:keys", f"{__name__}:GIVEN"],
        ids=["tuple", "list", "function", "dotted", "colon", "value"],
    )
    def test_may_be_given_in_several_ways(self, given: Any) -> None:
        for task in (
            task_in(celery(idempotency_encryption_keys=given)),
            task_in(celery(), idempotency_encryption_keys=given),
        ):
            configured = task.idempotency_configuration
            payload = configured.executor.codec.of_result(
                "a card number", configured.settings, key="k", token=1
            )
            assert payload.format == "!json"
            assert KEY not in repr(configured.settings)

    def test_of_a_function_are_requested_at_first_use(self) -> None:
        key_requests.clear()
        configured = task_in(celery(idempotency_encryption_keys=keys)).idempotency_configuration
        assert key_requests == []

        for _ in range(2):
            assert configured.executor

        assert len(key_requests) == 1

    def test_of_several_tasks_may_differ(self) -> None:
        app = celery()
        executors = [
            task_in(
                app, name=f"shop.{n}", idempotency_encryption_keys=given
            ).idempotency_configuration.executor
            for n, given in enumerate([None, (KEY,), [KEY], keys])
        ]

        assert executors[1] is executors[2]
        assert len(set(map(id, executors))) == 3

    @pytest.mark.parametrize(
        "given",
        [("secret",), (KEY, "secret"), [b"secret secret"], "secret", (), KEY],
        ids=["short", "second", "bytes", "no-path", "empty", "not-in-a-tuple"],
    )
    def test_that_are_invalid_are_rejected_at_once(self, given: Any) -> None:
        for message in (
            error_of(celery(idempotency_encryption_keys=given)),
            error_of(celery(), idempotency_encryption_keys=given),
        ):
            assert "idempotency_encryption_keys" in message
            assert KEY not in message

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                f"{__name__}.nothing",
                "'tests.unit.configuration.test_configuration.nothing' raised",
            ),
            ("no.such.module", "'no.such.module' raised ModuleNotFoundError"),
            (
                keys_of_an_unavailable_vault,
                "its function raised OSError instead of returning keys",
            ),
            (lambda: KEY, "its function must return a tuple of Fernet keys, not str"),
            (lambda: None, "its function must return a tuple of Fernet keys, not NoneType"),
            (lambda: (), "is empty; set at least one key"),
            (lambda: ["secret"], "key 1 of 1 is not a Fernet key"),
        ],
        ids=["no-name", "no-module", "raises", "text", "none", "empty", "no-key"],
    )
    def test_that_are_unavailable_are_rejected_at_first_use(self, given: Any, message: str) -> None:
        task = task_in(celery(idempotency_encryption_keys=given))

        with pytest.raises(ImproperlyConfigured, match="idempotency_encryption_keys") as caught:
            _ = task.idempotency_configuration.executor
        assert message in str(caught.value)
        assert "secret" not in str(caught.value)
        assert KEY not in str(caught.value)


GIVEN = [KEY]


class TestSerializer:
    def test_is_the_result_serializer_of_the_app_by_default(self) -> None:
        pickling = {"result_serializer": "pickle", "accept_content": ["pickle"]}

        assert settings_of(celery(**pickling)).serializer == "pickle"
        with pytest.raises(ImproperlyConfigured, match="'json' writes a content type"):
            settings_of(celery(**pickling), idempotency_serializer="json")

    def test_has_to_be_in_result_accept_content(self) -> None:
        app = celery(result_accept_content=["json", "pickle"], accept_content=["json"])

        assert settings_of(app, idempotency_serializer="pickle").serializer == "pickle"


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
        assert str(store.config) == "function of your own"

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
            "Redis: set it to the URL of the Redis server that is to hold the records"
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


def test_the_task_survives_crashes_by_default() -> None:
    task = task_in(celery())
    plain = task_in(celery(), acks_late=False)

    assert task.acks_late
    assert task.reject_on_worker_lost
    assert not plain.acks_late
