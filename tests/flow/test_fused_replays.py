"""Fused completion of replays: one script writes the value of a duplicate as Celery's result."""

from __future__ import annotations

from typing import Any

import pytest
from celery.states import FAILURE
from celery.worker.request import Request

from celery_idempotent.core.store import scripts
from celery_idempotent.core.store.node import THRESHOLD
from celery_idempotent.signals import begin_replied
from celery_idempotent.signals import replayed as replayed_signal
from tests.faults.proxy import Proxy
from tests.flow.deliveries import BY_CELERY, Deliveries, Offer, meta_of, recorded
from tests.servers.redis_server import RedisServer

RECEIPT = {"receipt": "order"}
WRITTEN_BY_CELERY = BY_CELERY[2:]


def replayed(server: RedisServer, deliveries: Deliveries, **options: Any) -> list[str]:
    """Returns what a duplicate of `order` sends; its reference, which has no reply, is left out.

    Sent before: all scripts, over open connections.
    """
    deliveries.deliver(deliveries.publish("order"))
    deliveries.deliver(deliveries.publish("order", **options))
    return sent_by_duplicate(server, deliveries, deliveries.publish("order", **options))


def sent_by_duplicate(server: RedisServer, deliveries: Deliveries, duplicate: Request) -> list[str]:
    with recorded(server) as sent:
        assert deliveries.deliver(duplicate).state == "success"
    return [name for name in sent if name != "SET"]


@pytest.mark.core
def test_a_replay_takes_two_round_trips(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()

    assert replayed(server, deliveries) == ["EVALSHA", "EVALSHA"]


@pytest.mark.core
def test_a_redelivery_reads_its_result_only(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()
    deliveries.deliver(deliveries.publish("warm-up"))
    message = deliveries.publish("order")
    deliveries.deliver(message)
    first = meta_of(deliveries, message.id)

    assert sent_by_duplicate(server, deliveries, message) == ["EVALSHA", "GET"]
    assert meta_of(deliveries, message.id) == first


def test_a_record_that_is_forgotten_before_the_write(server: RedisServer, offer: Offer) -> None:
    """Its outcome was decided, and the duplicate has it."""
    deliveries = offer()
    deliveries.deliver(deliveries.publish("order"))
    duplicate = deliveries.publish("order")

    def forget(sender: Any, **_: Any) -> None:
        sender.idempotency_forget("order")

    replayed_signal.connect(forget, sender=deliveries.task)
    deliveries.deliver(duplicate)

    assert deliveries.task.idempotency_record("order") is None
    assert meta_of(deliveries, duplicate.id)["result"] == RECEIPT


def fail(self: Any, order: str) -> None:
    raise KeyError(order)


@pytest.mark.parametrize("case", ["off", "callback"])
def test_other_calls_are_left_to_celery(server: RedisServer, offer: Offer, case: str) -> None:
    deliveries = offer(idempotency_fused_completion=case != "off")
    deliveries.deliver(deliveries.publish("order"))
    link = deliveries.task.si("next") if case == "callback" else None
    deliveries.deliver(deliveries.publish("order", link=link))  # loads the scripts
    while deliveries.next() is not None:
        pass  # what followed it
    duplicate = deliveries.publish("order", link=link)

    sent = sent_by_duplicate(server, deliveries, duplicate)

    assert sent[:1] + sent[-5:] == ["EVALSHA", *WRITTEN_BY_CELERY]
    assert sent.count("EVALSHA") == 1


def test_an_error_is_left_to_celery(server: RedisServer, offer: Offer) -> None:
    deliveries = offer(fail, options={"idempotency_replay_errors": (KeyError,)})
    deliveries.deliver(deliveries.publish("order"))
    duplicate = deliveries.publish("order")

    with recorded(server) as sent:
        assert deliveries.deliver(duplicate).state == "failure"

    assert sent.count("EVALSHA") == 1
    assert meta_of(deliveries, duplicate.id)["status"] == FAILURE


@pytest.mark.parametrize("losses", [1, 20])
def test_lost_requests(server: RedisServer, offer: Offer, losses: int) -> None:
    """After the first one the script is sent again; in an outage Celery writes the result."""
    with Proxy(server.url) as proxy:
        deliveries = offer(result_backend=proxy.url)
        replayed(server, deliveries)
        duplicate = deliveries.publish("order")
        for _ in range(losses):
            proxy.lose_request(to=scripts.load("settle").sha)
        proxy.requests.clear()

        assert deliveries.deliver(duplicate).state == "success"

        assert bool(proxy.requests_with("SETEX")) == (losses > 1)
        assert meta_of(deliveries, duplicate.id)["result"] == RECEIPT


def test_an_open_breaker_sends_nothing(server: RedisServer, offer: Offer) -> None:
    deliveries = offer()
    replayed(server, deliveries)
    breaker = deliveries.task.idempotency_configuration.executor.store.node.breaker

    def trip(**_: Any) -> None:
        for _ in range(THRESHOLD):
            breaker.record_failure()

    begin_replied.connect(trip, sender=deliveries.task, weak=False)
    sent = sent_by_duplicate(server, deliveries, deliveries.publish("order"))

    assert breaker.open
    assert sent[0] == "EVALSHA"
    assert sent[-4:] == WRITTEN_BY_CELERY[-4:]
    assert sent.count("EVALSHA") == 1
