"""A copy of a message whose continuation another delivery may be sending at this moment."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask
from celery_idempotent.core.task.message.canvas import REPLACED_HEADER
from celery_idempotent.core.task.message.eta import seconds_until
from tests.flow.deliveries import Deliveries, End, Make, Offer, record_of


def never(task: IdempotentTask) -> None:
    raise AssertionError("it has run already")


class Copy:
    """A message with a callback, whose outcome another delivery has stored."""

    def __init__(self, task: Make, app: Celery, **options: Any) -> None:
        self.task = task(never, **options)
        self.app = app
        self.deliveries = Deliveries(app, self.task)
        self.report = app.signature("report", immutable=True, queue="reports")
        self.message = self.deliveries.publish(link=self.report)
        self.record = record_of(self.task)

    def complete(self, sending_ms: int = 60_000) -> None:
        self.token = self.record.started(task_id=self.message.id, worker="here/1").token
        assert self.record.complete(self.token, sending_ms=sending_ms).case == "ok"

    def mark(self) -> None:
        self.record.mark_sent(self.token)

    def die(self) -> None:
        """Ends the time of the other delivery, as its parent does."""
        assert self.record.abandon(self.message.id, "here/1").case == "sending"

    def deliver(self) -> End:
        return self.deliveries.deliver(self.message)

    def reports(self) -> int:
        """Returns how many continuations were sent."""
        return self.app.connection_for_read().default_channel.queue_purge("reports")


def test_is_put_back_and_sends_none(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete()

    assert copy.deliver().state == "ignored"
    assert copy.reports() == 0
    copy.message = copy.deliveries.received()
    copy.mark()
    assert copy.deliver().state == "success"
    assert copy.reports() == 0


def test_comes_back_when_the_time_of_the_other_one_ends(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete(sending_ms=20_000)
    for _ in range(7):
        assert copy.deliver().state == "ignored"
        copy.message = copy.deliveries.received()

    assert seconds_until(copy.message.request_dict["eta"]) <= 20


def test_sends_it_once_if_the_other_one_has_died(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete()
    copy.die()

    assert [copy.deliver().state, copy.deliver().state] == ["success"] * 2
    assert copy.reports() == 1


def test_waits_for_the_time_of_one_that_could_not_send(
    task: Make, broker_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery fails a task whose callback cannot be published."""
    copy = Copy(task, broker_app)
    copy.complete()
    copy.die()

    def refuse(*_: object, **__: object) -> None:
        raise OperationalError("the broker is away")

    with monkeypatch.context() as patch:
        patch.setattr(broker_app.amqp, "send_task_message", refuse)
        assert copy.deliver().state == "failure"
    assert copy.reports() == 0

    assert copy.deliver().state == "ignored"
    assert copy.task.idempotency_record().sending


def test_one_that_cannot_send_leaves_it_to_the_next(offer: Offer) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OperationalError("the broker is away")

    deliveries = offer()
    message = deliveries.publish("order", link=deliveries.task.si("linked"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliveries.app.amqp, "send_task_message", refuse)
        assert deliveries.deliver(message).state == "failure"

    assert deliveries.task.idempotency_record("order").sending


def test_a_duplicate_sends_its_own(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete()
    copy.message = copy.deliveries.publish(link=copy.report)

    assert copy.deliver().state == "success"
    assert copy.reports() == 1


def test_a_plain_task_that_replaces_itself_passes_on_what_it_has_replaced(offer: Offer) -> None:
    """The last one in turn has the identity of the first."""

    def replace(self: IdempotentTask, order: str) -> str:
        if order == "old":
            self.replace(relay.si())
        return order

    deliveries = offer(replace)

    @deliveries.app.task(bind=True, shared=False)
    def relay(self: Task) -> None:
        self.replace(deliveries.task.si("new"))

    messages = [deliveries.publish("old")]
    for _ in range(2):
        assert deliveries.deliver(messages[-1]).state == "ignored"
        messages.append(deliveries.received())

    first, between, last = (message.request_dict.get(REPLACED_HEADER) for message in messages)
    assert first is None
    assert between
    assert last == between
