"""Construction and options of the engine."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from celery import Celery, shared_task

from celery_idempotent import Idempotency
from celery_idempotent.errors import SettingsError
from tests.servers.redis_server import RedisServer

WAIT_OR_RAISE = "must be 'wait' or 'raise' outside tasks"
RAISE_OR_RUN = "must be 'raise' or 'run' outside tasks"


class TestConstruction:
    def test_an_app_provides_settings_and_connections(self, server: RedisServer, key: str) -> None:
        app = Celery("shop", backend=server.url, set_as_current=False)
        app.conf.update(idempotency_lease=7, idempotency_on_conflict="reject")
        idem = Idempotency(app, key_prefix=key)

        assert idem.settings.lease == 7
        assert idem.settings.on_conflict == "wait"
        assert idem.idempotent(lambda order: order)(key) == key
        assert Idempotency(app, key_prefix=key).executor is idem.executor

    def test_a_client_serves_either_blocking_code_or_coroutines(
        self, server: RedisServer, key: str
    ) -> None:
        blocking = Idempotency(server.client(), key_prefix=key)

        async def charge(order: str) -> str:
            return order

        assert blocking.idempotent(lambda order: order)(key) == key
        with pytest.raises(
            SettingsError, match=r"is a redis\.client\.Redis; it must be a redis\.asyncio"
        ):
            asyncio.run(blocking.idempotent(charge)(key))

        async def with_async_client() -> None:
            client = redis.asyncio.Redis.from_url(server.url)
            engine = Idempotency(client, key_prefix=key)
            assert await engine.idempotent(charge)(key) == key
            with pytest.raises(
                SettingsError,
                match=r"is a redis\.asyncio\.client\.Redis; it must be a redis\.Redis or",
            ):
                engine.idempotent(lambda order: order)(key)
            await client.aclose()

        asyncio.run(with_async_client())

    def test_functions_that_share_a_name_are_logged(
        self, idem: Idempotency, caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            idem.idempotent(lambda order: order)
        assert caplog.text.count("Several functions are named") == 1
        with pytest.raises(SettingsError, match="a partial has no name of its own; pass name="):
            idem.idempotent(partial(print))

    def test_a_function_keeps_its_name_and_signature(self, idem: Idempotency) -> None:
        @idem.idempotent
        def charge(order: str) -> str:
            """Charges."""
            return order

        assert (charge.__name__, charge.__doc__) == ("charge", "Charges.")
        assert list(inspect.signature(charge).parameters) == ["order"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leas": 1}, "Idempotency 'calls': there is no option leas; did you mean lease?"),
        (
            {"idempotency_lease": 1},
            "Idempotency 'calls': there is no option idempotency_lease; did you mean lease?",
        ),
        ({"lease": 0}, "Idempotency 'calls': lease must be seconds or a timedelta"),
        ({"on_conflict": "retry"}, "on_conflict must be 'wait' or 'raise' outside tasks"),
        ({"on_conflict": "ignore"}, "on_conflict must be 'wait' or 'raise' outside tasks"),
        ({"on_store_error": "retry"}, "on_store_error must be 'raise' or 'run' outside tasks"),
        ({"dedupe_publish": True}, "dedupe_publish is for tasks only"),
        ({"serializer": "nonesuch"}, "kombu has no serializer 'nonesuch'"),
        ({"offload_backend": "file:///tmp"}, "create Idempotency from the app"),
    ],
)
def test_an_invalid_option_is_rejected_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Idempotency("redis://", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leas": 1}, "shop.charge: there is no option leas; did you mean lease?"),
        ({"key_prefix": "x"}, "key_prefix can only be set for the whole engine"),
        ({"serializer": "pickle"}, "'pickle' writes a content type that is not in"),
        ({"key": "order:{number}"}, "idempotency_key names 'number'"),
        ({"idempotency_key": "order:{order}"}, "no option idempotency_key; did you mean key?"),
    ],
)
def test_an_invalid_option_of_a_function_is_rejected_in_one_line(
    idem: Idempotency, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        idem.idempotent(name="shop.charge", **options)(lambda order: order)
    assert message in str(caught.value)
    assert str(caught.value).startswith("shop.charge")


@pytest.mark.parametrize("decorate", [Celery("shop", set_as_current=False).task, shared_task])
def test_a_task_is_no_function(idem: Idempotency, decorate: Any) -> None:
    def charge(order: str) -> None: ...

    with pytest.raises(SettingsError, match="is a Celery task, whose messages would run unprot"):
        idem.idempotent(key="order:{order}")(decorate(charge))


def test_an_unknown_option_of_a_block_suggests_the_nearest(idem: Idempotency) -> None:
    with pytest.raises(SettingsError) as caught:
        idem.execution("order:42", wait_timout=1)

    assert str(caught.value) == (
        f"{idem.name}: there is no option wait_timout; did you mean wait_timeout?"
    )


def test_an_invalid_setting_of_the_app_is_named_as_the_app_names_it(server: RedisServer) -> None:
    app = Celery("shop", backend=server.url, set_as_current=False)
    app.conf.idempotency_lease = "60"

    with pytest.raises(SettingsError, match=r"^Idempotency 'calls': idempotency_lease must be"):
        Idempotency(app)
    with pytest.raises(SettingsError, match=r"^Idempotency 'calls': lease must be"):
        Idempotency(app, lease="90")
