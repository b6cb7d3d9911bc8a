"""A copy of a message whose continuation another delivery may be sending at this moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task
from kombu.exceptions import OperationalError

from celery_idempotent import IdempotentTask
from celery_idempotent.key.key import default_root
from celery_idempotent.record import layout
from celery_idempotent.record.payload import Payload
from celery_idempotent.store import commands
from celery_idempotent.task.canvas import REPLACED_HEADER
from celery_idempotent.task.message_headers import MessageHeaders
from celery_idempotent.task.republish import seconds_until
from tests.flow.deliveries import Deliveries, End, Offer, begin_elsewhere
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

Make = Callable[..., IdempotentTask]

ANOTHER = b"another!"


def never(task: IdempotentTask) -> None:
    raise AssertionError("it has run already")


class Copy:
    """A message with a callback, whose outcome another delivery has stored."""

    def __init__(self, task: Make, app: Celery, **options: Any) -> None:
        self.task = task(never, **options)
        self.app = app
        self.deliveries = Deliveries(app, self.task)
        report = app.signature("report", immutable=True, queue="reports")
        self.message = self.deliveries.publish(link=report)
        self.key = self.task.idempotency_key_of()
        headers = MessageHeaders.read(self.task.name, self.message.id, self.message.request_dict)
        self.root = headers.root
        self._execute = self.task.idempotency_configuration.execute

    def complete(self, sending_ms: int = 60_000) -> None:
        assert self.root not in (b"", default_root(self.message.id)), "the publish has drawn a root"
        begun = begin_elsewhere(
            self.task, "", task_id=self.message.id, root=self.root, worker="here/1"
        )
        token = layout.begun(begun.raw).token
        payload = Payload("json", b"1")
        complete = commands.complete(self.key, token, payload, 60_000, sending_ms=sending_ms)
        assert self._execute(complete).case == "ok"

    def mark(self) -> None:
        self._execute(commands.mark_continued(self.key, self.root, ANOTHER))

    def die(self) -> None:
        """Ends the lease of the other delivery, as its parent does."""
        abandon = commands.abandon(self.key, self.message.id, "here/1", root=self.root, grace_ms=0)
        assert self._execute(abandon).case == "sending"

    def deliver(self) -> End:
        return self.deliveries.deliver(self.message)

    def reports(self) -> int:
        """Returns how many continuations were sent."""
        return self.app.connection_for_read().default_channel.queue_purge("reports")


def test_is_requeued_and_sends_none(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete()

    assert copy.deliver().state == "ignored"
    assert copy.reports() == 0
    copy.message = copy.deliveries.received()
    copy.mark()
    assert copy.deliver().state == "success"
    assert copy.reports() == 0


def test_comes_back_when_the_lease_of_the_other_delivery_ends(
    task: Make, broker_app: Celery
) -> None:
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


@pytest.mark.exhaustive
def test_sends_it_at_once_if_the_last_one_could_not(
    task: Make, broker_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery fails a task whose callback cannot be published."""
    copy = Copy(task, broker_app)
    copy.complete()
    copy.die()
    with monkeypatch.context() as patch:
        patch.setattr(broker_app.amqp, "send_task_message", _refuse)
        assert copy.deliver().state == "failure"
    assert copy.reports() == 0

    assert copy.deliver().state == "success"
    assert copy.reports() == 1


def _refuse(*_: object, **__: object) -> None:
    raise OperationalError("the broker is away")


def test_the_loss_of_its_right_is_logged(
    task: Make, broker_app: Celery, server: RedisServer,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Another program deletes the records while it is being sent, and overwrites them."""
    copy = Copy(task, broker_app, lease=1)
    copy.complete()
    copy.die()

    def lose(*_: object, **__: object) -> None:
        with server.client() as client:
            names = client.keys("idem:*")
            client.delete(*names)
            lost = "has lost the lease of its continuation"
            eventually(lambda: lost in caplog.text, "the heartbeat has found the loss")
            for name in names:
                client.rpush(name, "another program's")
        _refuse()

    monkeypatch.setattr(broker_app.amqp, "send_task_message", lose)

    assert copy.deliver().state == "failure"
    assert "has not sent its continuation: " in caplog.text


def test_a_duplicate_sends_its_own_once(task: Make, broker_app: Celery) -> None:
    copy = Copy(task, broker_app)
    copy.complete()
    report = broker_app.signature("report", immutable=True, queue="reports")
    copy.message = copy.deliveries.publish(link=report)

    assert [copy.deliver().state, copy.deliver().state] == ["success"] * 2
    assert copy.reports() == 1


def test_a_message_of_it_has_the_same_root_in_every_version(offer: Offer) -> None:
    """A newer worker may send it again."""
    deliveries = offer()
    link = deliveries.task.s().set(task_id="the next")
    deliveries.app.send_task(deliveries.task.name, ("1",), task_id="the first", link=link)
    assert deliveries.deliver(deliveries.received()).state == "success"

    following = deliveries.received()

    headers = MessageHeaders.read(deliveries.task.name, "the next", following.request_dict)
    assert headers.root.hex() == "ca9b104ba1a76c62"


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
