"""Construction and options of the engine."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery, shared_task
from celery._state import _tls

from celery_idempotent import Idempotency
from celery_idempotent.errors import SettingsError
from tests.servers.redis_server import RedisServer


class TestConstruction:
    def test_an_app_provides_settings_and_connections(self, server: RedisServer, key: str) -> None:
        app = Celery("shop", backend=server.url, set_as_current=False)
        app.conf.update(idempotency_lease=7, idempotency_on_conflict="reject")
        idem = Idempotency(app, key_prefix=key)

        assert idem.settings.lease == 7
        assert idem.settings.on_conflict == "wait"
        assert idem.idempotent(name="charge")(lambda order: order)(key) == key
        assert Idempotency(app, key_prefix=key).executor is idem.executor

    def test_a_client_serves_functions_or_coroutines(self, server: RedisServer, key: str) -> None:
        blocking = Idempotency(server.client(), key_prefix=key)

        async def charge(order: str) -> str:
            return order

        assert blocking.idempotent(name="blocking")(lambda order: order)(key) == key
        message = r"is a redis\.client\.Redis; it must be a redis\.as"
        with pytest.raises(SettingsError, match=message):
            asyncio.run(blocking.idempotent(name="async")(charge)(key))

        async def with_async_client() -> None:
            client = redis.asyncio.Redis.from_url(server.url)
            engine = Idempotency(client, key_prefix=key)
            assert await engine.idempotent(name="async")(charge)(key) == key
            message = r"is a redis\.asyncio\.\w+\.Redis; .* a redis\.Redis"
            with pytest.raises(SettingsError, match=message):
                engine.idempotent(name="blocking")(lambda order: order)(key)
            await client.aclose()

        asyncio.run(with_async_client())

    def test_two_functions_never_share_a_name(self, idem: Idempotency) -> None:
        def charge(order: str) -> str:
            return order

        for function in (charge, lambda order: order, "".join):
            with pytest.raises(SettingsError, match=" is not unique, .*; pass name="):
                idem.idempotent(function)
            idem.idempotent(function, name=function.__name__)
        idem.idempotent(charge, name="charge")
        with pytest.raises(SettingsError, match="two functions are named charge, .*; pass another"):
            idem.idempotent(name="charge")(lambda order: order)
        idem.idempotent(name="charge")(wraps(charge)(lambda order: charge(order)))
        idem.idempotent(name="count")(Counter("a").most_common)
        with pytest.raises(SettingsError, match="two functions are named count, "):
            idem.idempotent(name="count")(Counter("b").most_common)
        with pytest.raises(SettingsError, match="a partial has no name of its own; pass name="):
            idem.idempotent(partial(print))

    def test_the_key_of_a_method_includes_its_object(self, idem: Idempotency) -> None:
        def pay(self: Any, order: str) -> str:
            return f"{type(self).__name__} {order}"

        with pytest.raises(SettingsError, match="pay is a method, and its key leaves out self"):
            idem.idempotent(key="{order}", name="pay")(pay)
        by_class = idem.idempotent(
            key=lambda self, order: (type(self).__name__, order), name="pay"
        )(pay)

        class Service:
            pay = by_class

        class Refunds(Service): ...

        assert [each().pay("7") for each in (Service, Refunds)] == ["Service 7", "Refunds 7"]

    def test_a_function_keeps_its_name_and_signature(self, idem: Idempotency) -> None:
        @idem.idempotent(name="charge")
        def charge(order: str) -> str:
            """Charges."""
            return order

        assert (charge.__name__, charge.__doc__) == ("charge", "Charges.")
        assert list(inspect.signature(charge).parameters) == ["order"]


def engine(**options: Any) -> None:
    Idempotency("redis://", **options)


def function(**options: Any) -> None:
    Idempotency("redis://").idempotent(name="shop.charge", **options)(lambda order: order)


def block(**options: Any) -> None:
    Idempotency("redis://").execution("order:42", **options)


@pytest.mark.parametrize(
    ("create", "options", "message"),
    [
        (engine, {"leas": 1}, "Idempotency 'calls': there is no option leas; did you mean lease?"),
        (engine, {"idempotency_lease": 1}, "no option idempotency_lease; did you mean lease?"),
        (engine, {"lease": 0}, "Idempotency 'calls': lease must be seconds or a timedelta"),
        (engine, {"on_conflict": "retry"}, "must be 'wait' or 'raise' outside tasks"),
        (engine, {"on_conflict": "ignore"}, "must be 'wait' or 'raise' outside tasks"),
        (engine, {"on_store_error": "retry"}, "must be 'raise' or 'run' outside tasks"),
        (engine, {"dedupe_publish": True}, "dedupe_publish is for tasks only"),
        (engine, {"serializer": "nonesuch"}, "kombu has no serializer 'nonesuch'"),
        (engine, {"encryption_keys": (b"secret",)}, "key 1 of 1 is not a Fernet key"),
        (engine, {"offload_backend": "file:///tmp"}, "create Idempotency from the app"),
        (function, {"leas": 1}, "shop.charge: there is no option leas; did you mean lease?"),
        (function, {"key_prefix": "x"}, "can only be set for the whole engine"),
        (function, {"encryption_keys": (b"x",)}, "can only be set for the whole engine"),
        (function, {"serializer": "pickle"}, "'pickle' writes a content type that is not in"),
        (function, {"key": "order:{number}"}, "idempotency_key names 'number'"),
        (function, {"idempotency_key": "order:{order}"}, "idempotency_key; did you mean key?"),
        (block, {"wait_timout": 1}, "there is no option wait_timout; did you mean wait_timeout?"),
        (function, {"until": "started"}, "until must be 'expired' or 'finished' outside tasks"),
    ],
)
def test_an_invalid_option_is_rejected_in_one_line(
    create: Callable[..., None], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        create(**options)
    where = {engine: "", function: "shop.charge", block: "calls: "}[create]
    assert str(caught.value).startswith(where)
    assert message in str(caught.value)
    assert next(iter(options)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decorate", [Celery("shop", set_as_current=False).task, shared_task])
def test_a_task_is_no_function(monkeypatch: Any, idem: Idempotency, decorate: Any) -> None:
    # A shared task belongs to the current app; that of an earlier test may be closed.
    monkeypatch.setattr(_tls, "current_app", Celery("current", set_as_current=False))

    def charge(order: str) -> None: ...

    with pytest.raises(SettingsError, match="is a Celery task, whose messages would run unprot"):
        idem.idempotent(key="order:{order}")(decorate(charge))


def test_an_invalid_setting_of_the_app_is_named_as_the_app_names_it(server: RedisServer) -> None:
    app = Celery("shop", backend=server.url, set_as_current=False)
    app.conf.idempotency_lease = "60"

    with pytest.raises(SettingsError, match=r"^Idempotency 'calls': idempotency_lease must be"):
        Idempotency(app)
    with pytest.raises(SettingsError, match=r"^Idempotency 'calls': lease must be"):
        Idempotency(app, lease="90")
