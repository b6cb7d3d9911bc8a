"""What messages carry, what HTTP stores, and what a snapshot of keys holds."""

from __future__ import annotations

import json
from typing import Any

from celery.app.task import Context

from celery_idempotent import Idempotency
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, anonymous
from celery_idempotent.core.task.message import canvas
from celery_idempotent.core.task.message.message_headers import MessageHeaders
from celery_idempotent.core.task.publish.message_copy import retry_headers, with_derived_key
from celery_idempotent.core.task.publish.replacement import mark_replaced
from celery_idempotent.operations.doctor import key_snapshot
from tests.golden import cases
from tests.golden.cases import Case
from tests.golden.shop import LONG_MS, VALUE, Shop
from tests.http.drivers.wsgi import environ, request
from tests.store.record_harness import FIRST, SECOND

TASK = "golden.charge"
EXPLICIT = ["acme", "req-7f3a"]


def read(headers: Any) -> MessageHeaders:
    return MessageHeaders.read(TASK, FIRST, headers)


def put_back(shop: Shop) -> dict[str, Any]:
    """Returns the headers of a message that was put back, with a key that its arguments lack."""
    key = shop.tasks["charge"].idempotency_key_of("2", 500)
    shop.tasks["charge"].apply(("2", 500))
    return with_derived_key({"mine": 1}, key, FIRST, put_back_count=3)


def is_put_back(shop: Shop, kept: Any) -> None:
    parsed = read(kept)
    assert parsed.key == shop.tasks["charge"].idempotency_key_of("2", 500)
    assert parsed.put_back_count == 3
    assert shop.call("charge", task_id=FIRST, headers=kept)["order"] == "2"
    assert shop.runs == []


def retry(shop: Shop) -> dict[str, Any]:
    headers = MessageHeaders(EXPLICIT).write(TASK, FIRST)
    headers["idempotency_result_ttl"] = 600
    headers = retry_headers(TASK, FIRST, headers, {"mine": 1})
    shop.call("charge", task_id=FIRST, headers=headers)
    return headers


def is_retried(shop: Shop, kept: Any) -> None:
    parsed = read(kept)
    assert (parsed.explicit_key, parsed.result_ttl) == (EXPLICIT, 600)
    assert shop.call("charge", task_id=FIRST, headers=kept) == VALUE
    assert shop.runs == []
    # Another message, to which a task has forwarded them, ignores them.
    assert MessageHeaders.read(TASK, SECOND, kept) == MessageHeaders()


def switch_off(shop: Shop) -> dict[str, Any]:
    return MessageHeaders(explicit_key=False).write(TASK, FIRST)


def is_switched_off(shop: Shop, kept: Any) -> None:
    assert read(kept).explicit_key is False


def publish(shop: Shop) -> dict[str, Any]:
    """Returns the message of a call that was published with deduplication, as the broker has it."""
    result = shop.tasks["reserved"].apply_async(("1", 500), task_id=FIRST)
    (message,) = shop.redis.lrange("celery", 0, -1)
    headers = json.loads(message)["headers"]
    assert result.id == headers["id"] == FIRST
    shop.record("reserved").reserved(hold_ms=LONG_MS)
    return {name: value for name, value in headers.items() if name.startswith("idempotency")}


def is_published(shop: Shop, kept: Any) -> None:
    assert shop.tasks["reserved"].delay("1", 500).id == FIRST
    assert shop.call("reserved", task_id=FIRST, headers=kept) == VALUE


def replace(shop: Shop) -> dict[str, Any]:
    """Returns the headers of the messages of a canvas that replaces a running task."""
    sig = shop.tasks["charge"].s("1", 500)
    context = Context(id=FIRST, headers={}, is_eager=False)
    mark_replaced(sig, shop.record("charge").key, context)
    headers: dict[str, Any] = sig.options["headers"]
    return headers


def continues_the_key(shop: Shop, kept: Any) -> None:
    key = shop.record("charge").key
    context = Context(id=FIRST, headers=kept, is_eager=False, replaced_task_nesting=1)
    assert canvas.key_in_canvas(key, context, FIRST) == key
    assert canvas.key_in_canvas(key, context, SECOND) == key.part(SECOND)


def respond(body: bytes) -> Any:
    """Returns a case of a stored response."""
    handled: list[bytes] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        handled.append(body)
        start_response("201 Created", [("Content-Type", "text/plain"), ("X-Order", "1")])
        return [body]

    def send(shop: Shop) -> Any:
        idem = Idempotency(shop.app, name="golden.web")
        middleware = IdempotencyMiddleware(app, idem, identity=anonymous)
        return request(middleware, environ("req-7f3a", b"{}"))

    def leave(shop: Shop) -> None:
        assert send(shop).status == 201
        handled.clear()

    def check(shop: Shop, kept: Any) -> None:
        response = send(shop)
        assert (response.status, response.body) == (201, body)
        assert response.headers["x-order"] == "1"
        assert response.headers["idempotency-replayed"] == "true"
        assert handled == []

    return Case(leave, check)


def snapshot(shop: Shop) -> dict[str, Any]:
    return key_snapshot.document_of(list(shop.tasks.values()))


def keys_are_the_same(shop: Shop, kept: Any) -> None:
    before = key_snapshot.read(json.dumps(kept))
    assert before.keys() <= {task.name for task in shop.tasks.values()}
    assert all(snapshot.samples for snapshot in before.values())
    assert list(key_snapshot.check(shop.app, before)) == []


def quote(shop: Shop) -> Any:
    """Calls a function, which is not a task."""

    @shop.idem.idempotent(key="quote:{order}", name="golden.quote")
    def quote(order: str) -> list[Any]:
        shop.runs.append(1)
        return [order, 500]

    return quote("1")


def is_quoted(shop: Shop, kept: Any) -> None:
    assert quote(shop) == kept == ["1", 500]
    assert shop.runs == []


CASES = {
    **cases.CASES,
    "a message that was put back": Case(put_back, is_put_back),
    "a message of a retry": Case(retry, is_retried),
    "a message without protection": Case(switch_off, is_switched_off),
    "a message that was published once": Case(publish, is_published),
    "a message of a replacement": Case(replace, continues_the_key),
    "a response: text": respond("Zürich\n".encode()),
    "a response: bytes": respond(b"\x89PNG\r\n\0\xff"),
    "a result of a function": Case(quote, is_quoted),
    "a snapshot of keys": Case(snapshot, keys_are_the_same),
}
