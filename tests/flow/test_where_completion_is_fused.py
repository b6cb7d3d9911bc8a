"""Where fused completion is off, and the worker's results are written by Celery alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chord
from celery.backends.redis import RedisBackend
from celery.states import SUCCESS

from celery_idempotent import IdempotentTask
from tests.flow.deliveries import (
    BY_CELERY,
    FUSED,
    Offer,
    long_text,
    meta_of,
    pay,
    recorded,
    sent_by,
)
from tests.servers.redis_server import RedisServer


class OwnBackend(RedisBackend):
    """A result backend of the user's."""


class OwnCall(IdempotentTask):
    """A task that changes the value."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return {"value": super().__call__(*args, **kwargs)}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"idempotency_fused_completion": False}, "idempotency_fused_completion"),
    "option of a task": (
        {"options": {"idempotency_fused_completion": False}}, "idempotency_fused_completion",
    ),
    "other database": ({"idempotency_redis_url": "{url}1"}, "different servers, databases"),
    "other user": (
        {"idempotency_redis_url": "redis://default@{address}/0"}, "different servers, databases",
    ),
    "subclass": (
        {"result_backend": f"{__name__}:OwnBackend+{{url}}0", "idempotency_redis_url": "{url}0"},
        "OwnBackend",
    ),
    "ignored": ({"options": {"ignore_result": True}}, "ignore_result"),
    "shadow": ({"idempotency_shadow": True}, "idempotency_shadow"),
    "replicas": ({"idempotency_wait_replicas": 1}, "replicas"),
}  # fmt: skip


CALLS: dict[str, Callable[[Any], Any]] = {
    "link": lambda task: task.apply_async(("order",), link=task.si("next")),
    "link_error": lambda task: task.apply_async(("order",), link_error=task.si("next")),
    "chain": lambda task: (task.si("order") | task.si("next")).apply_async(),
    "chord": lambda task: chord([task.si("order")])(task.si("next")),
    "chain of the body": lambda task: task.delay("add to the chain"),
    "ignore_result": lambda task: task.apply_async(("order",), ignore_result=True),
}


class TestWhereItIsOff:
    """Celery writes the result, and `fusion_obstacle` names the reason."""

    @pytest.mark.parametrize("case", CASES)
    def test_for_a_task(self, server: RedisServer, offer: Offer, case: str) -> None:
        how, reason = CASES[case]
        address = server.url.partition("://")[2].partition("/")[0].rpartition("@")[2]
        url = server.url.rpartition("/")[0] + "/"
        filled = {
            name: value.format(url=url, address=address) if isinstance(value, str) else value
            for name, value in how.items()
        }
        deliveries = offer(**filled)

        assert reason in deliveries.task.idempotency_configuration.fusion_obstacle

    @pytest.mark.parametrize(
        ("how", "commands"),
        [
            pytest.param({}, FUSED, marks=pytest.mark.core),
            ({"idempotency_fused_completion": False}, BY_CELERY),
            ({"body": long_text, "idempotency_max_result_size": 300}, BY_CELERY),
            ({"options": {"idempotency_redis_client": True}}, BY_CELERY),
        ],
        ids=["on", "off", "a large result", "a client of the user"],
    )
    def test_a_run_takes_two_round_trips_or_four(
        self, server: RedisServer, offer: Offer, how: dict[str, Any], commands: list[str]
    ) -> None:
        if "options" in how:
            how = {"options": {"idempotency_redis_client": server.client}}

        assert sent_by(server, offer(**{"body": pay, **how})) == commands

    def test_with_a_backend_of_the_task(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer()
        task = deliveries.task
        deliveries.deliver(deliveries.publish("in the app's"))
        task.backend = backend = RedisBackend(f"{server.url.rpartition('/')[0]}/1", app=task.app)
        message = deliveries.publish("order")

        deliveries.deliver(message)

        assert backend.get_task_meta(message.id)["result"] == {"receipt": "order"}
        assert deliveries.app.backend.get(backend.get_key_for_task(message.id)) is None
        backend.result_consumer.stop()
        backend.client.close()

    def test_an_own_call_does_not_turn_it_off(self, server: RedisServer, offer: Offer) -> None:
        deliveries = offer(base=OwnCall)
        message = deliveries.publish("first")

        deliveries.deliver(message)

        assert meta_of(deliveries, message.id)["result"] == {"value": {"receipt": "first"}}
        assert sent_by(server, deliveries) == FUSED

    def test_a_wrapper_of_an_instrumentation_does_not_turn_it_off(
        self, server: RedisServer, offer: Offer
    ) -> None:
        deliveries = offer()
        deliveries.app.finalize()
        cls = type(deliveries.task)
        original = cls.__call__
        cls.__call__ = lambda self, *args, **kwargs: original(self, *args, **kwargs)

        assert sent_by(server, deliveries) == FUSED

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("call", CALLS)
    def test_for_a_call(self, server: RedisServer, offer: Offer, call: str) -> None:
        deliveries = offer()
        deliveries.deliver(deliveries.publish("warm-up"))
        CALLS[call](deliveries.task)
        message = deliveries.next()

        with recorded(server) as sent:
            deliveries.deliver(message)

        assert sent[:2] == FUSED
        assert ("SETEX" in sent) == (call not in ("link_error", "ignore_result"))

    def test_for_an_eager_call(self, offer: Offer) -> None:
        deliveries = offer(task_always_eager=True, task_store_eager_result=True)

        result = deliveries.task.delay("order")

        assert result.get() == {"receipt": "order"}
        assert meta_of(deliveries, result.id)["status"] == SUCCESS
