"""Changes of ``self.request`` by a body or a handler: heeded as in Celery, except the id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Task
from celery.signals import task_prerun

from celery_idempotent import IdempotentTask, State
from celery_idempotent.core.task.publish import kept_message
from celery_idempotent.core.task.receive.request import IdempotentRequest
from tests.flow.deliveries import Deliveries, Offer


def rename(self: Any, end: str) -> str:
    """Changes the id of its request, like some who want another one in their logs."""
    self.request.id = f"renamed {self.request.id}"
    if end == "uses it":
        self.idempotency.check()
    if end == "raises":
        raise LookupError
    if end == "retries" and not self.request.retries:
        self.retry(countdown=0)
    if end == "is replaced" and not self.request.replaced_task_nesting:
        self.replace(self.s("of the replacement"))
    return end


@pytest.mark.parametrize("options", [{}, {"idempotency_fused_completion": False}, {"link": True}])
@pytest.mark.parametrize("end", ["returns", "uses it", "raises", "retries", "is replaced"])
def test_the_id_is_the_message_s(offer: Offer, end: str, options: dict[str, Any]) -> None:
    link = options.pop("link", False)
    deliveries = offer(rename, options={"idempotency_replay_errors": (LookupError,), **options})
    message = deliveries.delivered(end, **({"link": deliveries.task.si("linked")} if link else {}))
    if end in ("retries", "is replaced"):
        message = deliveries.received()
        deliveries.deliver(message)

    result = deliveries.app.AsyncResult(message.id)
    assert result.state == ("FAILURE" if end == "raises" else "SUCCESS")
    record = deliveries.task.idempotency_record(end)
    assert record is not None
    state = State.FAILED if end == "raises" else State.COMPLETED
    assert (record.state, record.task_id) == (state, message.id)
    assert not deliveries.app.backend.client.keys("celery-task-meta-renamed*")


def test_an_error_that_frees_the_key_is_that_of_the_message(offer: Offer) -> None:
    deliveries = offer(rename)
    message = deliveries.delivered("raises")

    assert deliveries.app.AsyncResult(message.id).state == "FAILURE"


def test_a_retry_hides_its_new_arguments(offer: Offer) -> None:
    def body(self: Any, card: str) -> None:
        self.retry(args=("secret",), argsrepr="(hidden)", countdown=0)

    deliveries = offer(body)
    deliveries.delivered("public")

    assert deliveries.received().request_dict["argsrepr"] == "(hidden)"


def test_a_handler_that_changes_the_id(offer: Offer) -> None:
    def change(task: Any, **_: Any) -> None:
        task.request.id = "renamed"

    deliveries = offer()
    task_prerun.connect(change, sender=deliveries.task)
    message = deliveries.delivered("order")

    assert deliveries.app.AsyncResult(message.id).state == "SUCCESS"


def test_a_body_that_resets_its_retries(offer: Offer) -> None:
    """To retry for longer than ``max_retries``."""

    def poll(self: Any, order: str) -> str:
        runs.append(self.request.retries)
        if len(runs) == 5:
            return order
        if self.request.retries == 2:
            self.request.retries = 0
        raise self.retry(countdown=0, max_retries=3)

    runs: list[int] = []
    deliveries = offer(poll)
    message = deliveries.publish("order")
    for _ in range(5):
        deliveries.deliver(message)
        message = deliveries.next() or message

    assert runs == [0, 1, 2, 1, 2]
    assert deliveries.app.AsyncResult(message.id).result == "order"


@pytest.mark.parametrize("headers", [{}, {"b": 2}], ids=["", "headers"])
def test_a_plain_call_has_the_headers_of_the_message(offer: Offer, headers: dict[str, Any]) -> None:
    """Celery copies the attributes of a request, and takes unknown ones for headers."""

    def body(self: Any, depth: int) -> Any:
        return self(depth - 1) if depth else self.request.headers

    def outcome(base: Any) -> Any:
        deliveries = offer(body, base=base)
        message = deliveries.delivered(1, headers=headers)
        return deliveries.app.AsyncResult(message.id).result

    assert outcome(IdempotentTask) == outcome(Task) == (headers or None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda self: None,
    "callbacks": lambda self: setattr(self.request, "callbacks", [self.si("added")]),
    "no callbacks": lambda self: setattr(self.request, "callbacks", None),
    "chain": lambda self: setattr(self.request, "chain", [self.si("added")]),
    "errbacks": lambda self: setattr(self.request, "errbacks", [self.si("added")]),
    "no errbacks": lambda self: setattr(self.request, "errbacks", None),
    "args": lambda self: setattr(self.request, "args", ("changed",)),
    "kwargs": lambda self: setattr(self.request, "kwargs", {"extra": 1}),
    "headers": lambda self: setattr(self.request, "headers", {"a": 1}),
    "a header": lambda self: self.request.headers.update(a=1),
    "no headers": lambda self: setattr(self.request, "headers", None),
    "root_id": lambda self: setattr(self.request, "root_id", "another"),
    "parent_id": lambda self: setattr(self.request, "parent_id", "another"),
    "delivery_info": lambda self: setattr(
        self.request, "delivery_info", {"exchange": "", "routing_key": "celery", "priority": 3}
    ),
    "expires": lambda self: setattr(self.request, "expires", None),
    "ignore_result": lambda self: setattr(self.request, "ignore_result", True),
    "group": lambda self: setattr(self.request, "group", "a group"),
    "shadow": lambda self: setattr(self.request, "shadow", "another name"),
    "retries": lambda self: setattr(self.request, "retries", 7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_fields_are_heeded_as_in_celery(offer: Offer, change: str) -> None:
    orders = [f"{end}{linked}" for end in ("returns", "raises", "retries") for linked in ("", "!")]

    def body(self: Any, order: str, extra: int = 0) -> str:
        if order not in orders or extra:
            return order
        retried = bool(self.request.retries)
        CHANGES[change](self)
        if order.startswith("raises"):
            raise LookupError
        if order.startswith("retries") and not retried:
            raise self.retry(countdown=0, max_retries=9)
        return order

    def outcome(deliveries: Deliveries, order: str) -> list[Any]:
        deliveries.purge()
        follow_up = {"link": deliveries.task.si("link"), "link_error": deliveries.task.si("error")}
        options = follow_up if order.endswith("!") else {}
        message = first = deliveries.publish(order, headers={"b": 2}, expires=60, **options)
        seen: list[Any] = [deliveries.deliver(message)[0]]
        while len(seen) < 8 and (message := deliveries.next()) is not None:
            seen.append(fields_of(message))
            if message.id == first.id:
                seen.append(deliveries.deliver(message)[0])
        meta = deliveries.app.backend.get_task_meta(first.id)
        return [order, *seen, meta["status"], str(meta["result"]), meta.get("group_id")]

    ours, celerys = offer(body), offer(body, base=Task)
    ends = [outcome(ours, order) for order in orders]

    assert ends == [outcome(celerys, order) for order in orders]


def fields_of(message: Any) -> dict[str, Any]:
    """Returns what a message says, without its ids and the headers of this package."""
    args, kwargs, _ = message.message.payload
    headers = message.request_dict
    fields = {name: headers.get(name) for name in ("retries", "shadow", "a", "b")}
    for name in ("root_id", "parent_id", "group"):
        fields[name] = headers.get(name) in ("another", "a group")
    fields["expires"] = headers.get("expires") is not None
    priority = message.message.properties.get("priority")
    return {**fields, "priority": priority, "args": args, "kwargs": kwargs}


@pytest.mark.parametrize("task_id", [uuid4(), b"bytes"], ids=["UUID", "bytes"])
@pytest.mark.parametrize("end", ["returns", "retries", "is replaced"])
def test_an_id_that_is_no_text(offer: Offer, task_id: UUID | bytes, end: str) -> None:
    deliveries = offer(rename)
    message = deliveries.delivered(end, task_id=task_id)
    if end != "returns":
        message = deliveries.received()
        deliveries.deliver(message)

    assert message.id == task_id
    result = deliveries.app.AsyncResult(task_id)
    assert result.state == "SUCCESS"
    assert deliveries.deliver(message).state == "success"


def test_a_failed_call_with_such_an_id_is_kept_for_a_rerun(offer: Offer) -> None:
    deliveries = offer(rename, options={"idempotency_replay_errors": (LookupError,)})
    task_id = uuid4()
    deliveries.delivered("raises", task_id=task_id)

    key = deliveries.task.idempotency_key_of("raises")
    kept = kept_message.find(deliveries.task, key, str(task_id))
    assert kept is not None
    assert list(kept.args) == ["raises"]


#: Celery makes an attribute of each header.
STATE = {
    "_protected": 1,
    "called_directly": True,
    "idempotency_host": "forged",
    "idempotency_end_logged": True,
    "idempotency_headers_again": "forged",
    "idempotency_soft_limit": "forged",
    "idempotency_without_body": True,
}


@pytest.mark.parametrize("is_protected", [True, False], ids=["", "unprotected"])
def test_a_header_is_not_the_state_of_a_call(offer: Offer, is_protected: bool) -> None:
    def body(self: Any, order: str) -> str:
        runs.append(self.idempotency.protected)
        return order

    runs: list[bool] = []
    deliveries = offer(body)
    for name in STATE:
        own_key = {} if is_protected else {"idempotency_key": False}
        deliveries.task.apply_async((name,), headers={name: STATE[name], **own_key})
        received = deliveries.received().message
        message = IdempotentRequest(received, app=deliveries.app, task=deliveries.task)
        for _ in range(2):
            assert deliveries.deliver(message).state == "success"

    assert runs == [is_protected] * len(STATE) * (1 if is_protected else 2)


@pytest.mark.parametrize("header", ["idempotency_result_ttl", "idempotency_key"])
def test_an_unusable_header_fails_no_unprotected_task(offer: Offer, header: str) -> None:
    deliveries = offer(rename, options={"idempotency_enabled": False})
    deliveries.app.send_task(deliveries.task.name, ("returns",), headers={header: ["unusable"]})

    assert deliveries.deliver(deliveries.received()).state == "success"
