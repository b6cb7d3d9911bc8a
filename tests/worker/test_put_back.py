"""A message that is put back or retried equals the original one, except for its eta."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.waiting import eventually
from tests.worker.canvas_tasks import report
from tests.worker.harness import OpenShop, Shop
from tests.worker.tasks import pack, silent, try_later

pytestmark = [pytest.mark.exhaustive, pytest.mark.core]

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "its queue": {"queue": "other"},
    "its priority": {"priority": 3},
    "its headers": {"headers": {"label": "urgent", "tags": ["a", "b"]}},
    "hidden arguments": {"argsrepr": "<hidden>", "kwargsrepr": "<hidden>"},
    "shadow": {"shadow": "pack for a friend"},
    "its expiry": {"expires": 3600},
    "time limits": {"time_limit": 50, "soft_time_limit": 40},
    "soft time limit": {"soft_time_limit": 40},
    "its serializer": {"serializer": "yaml"},
    "its compression": {"compression": "zlib"},
    "both": {"serializer": "yaml", "compression": "bzip2"},
    "reply_to": {"reply_to": "replies"},
    "delivery_mode": {"delivery_mode": 1},
    "stamps": {"stamped_headers": ["customer"], "customer": "c-7"},
    "properties of AMQP": {"message_id": "m-1", "app_id": "till", "type": "order"},
    "links": {"link": [report.si("linked", "-")], "link_error": [report.si("bad", "-")]},
    "canvas": {
        "root_id": "root",
        "parent_id": "parent",
        "group_id": "group",
        "group_index": 2,
        "replaced_task_nesting": 1,
        "chain": [report.si("next", "-")],
    },
    "ignore_result": {"ignore_result": True},
}
STORED = "ignore_result=False"
#: Headers that may differ.
CHANGES = ("eta", "retries", "idempotency", "idempotency_waits")
#: Properties that may differ. Celery copies some headers; the expiry is compared in the headers.
VARYING = ("delivery_tag", "expiration", "origin", "argsrepr", "kwargsrepr")


def wait_until_put_back(
    shop: Shop, task_ids: Iterable[str], counts: Iterable[int]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Waits until each message has been seen in a worker after each of these numbers of times.

    Returns the raw messages by task id and number. All of them are read together,
    because a message has the same number for a second or two only.
    """
    expected = {(task_id, count) for task_id in task_ids for count in counts}
    messages: dict[tuple[str, int], dict[str, Any]] = {}

    def find() -> bool:
        for raw in shop.redis.hvals("unacked"):
            message = json.loads(raw)[0]
            fields = message["headers"].get("idempotency", "").split(".")
            if len(fields) > 4:
                messages.setdefault((message["headers"]["id"], int(fields[4])), message)
        return expected <= messages.keys()

    eventually(find, "all messages were put back")
    return messages


def queued_messages(shop: Shop) -> dict[str, dict[str, Any]]:
    """Returns the raw messages in all queues, by task id."""
    names = [name for name in shop.redis.scan_iter() if shop.redis.type(name) == b"list"]
    messages = [json.loads(raw) for name in names for raw in shop.redis.lrange(name, 0, -1)]
    return {message["headers"]["id"]: message for message in messages if "id" in message["headers"]}


def constant(message: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the headers, properties and contents of a message that stay the same."""
    headers, properties = message["headers"].items(), message["properties"].items()
    return (
        {name: value for name, value in headers if name not in CHANGES},
        {name: value for name, value in properties if name not in VARYING},
        {name: message[name] for name in ("body", "content-type", "content-encoding")},
    )


Messages = dict[str, tuple[dict[str, Any], ...]]


@pytest.fixture(scope="module")
def put_back_messages(open_shop: OpenShop) -> Messages:
    """Messages of duplicates: as published, put back once and three times."""
    # Nothing wakes them while the first calls run: they come back after a lease.
    with open_shop(accept_content=["json", "yaml"], idempotency_lease=4) as shop:
        shop.start_worker("-Q", "first", concurrency=2)
        shop.ledger.hold("order")
        pack.apply_async(("order",), queue="first")
        silent.apply_async(("order",), queue="first")
        shop.ledger.wait_for_run("order", 2)
        for name, options in OPTIONS.items():
            pack.apply_async(("order",), {"amount": 1}, task_id=name, **options)
        silent.apply_async(("order",), task_id=STORED, ignore_result=False)
        before = queued_messages(shop)
        shop.start_worker("-Q", "celery,other", concurrency=2)
        put_back = wait_until_put_back(shop, before, (1, 3))
        shop.ledger.release("order")
        return {name: (before[name], put_back[name, 1], put_back[name, 3]) for name in before}


@pytest.mark.parametrize("name", [*OPTIONS, STORED])
def test_a_message_that_is_put_back_is_unchanged(put_back_messages: Messages, name: str) -> None:
    before, once, thrice = put_back_messages[name]

    assert constant(once) == constant(thrice) == constant(before)


@pytest.fixture(scope="module")
def retried_messages(open_shop: OpenShop) -> Messages:
    """Messages as published and as retried by Celery."""
    with open_shop(accept_content=["json", "yaml"]) as shop:
        for name, options in OPTIONS.items():
            try_later.apply_async((name, 60), task_id=name, **options)
        before = queued_messages(shop)
        shop.start_worker("-Q", "celery,other", concurrency=2)
        return {name: (before[name], retried(shop, name)) for name in OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_retried_message_is_unchanged(retried_messages: Messages, name: str) -> None:
    before, after = retried_messages[name]

    assert constant(after) == constant(before)


def retried(shop: Shop, task_id: str) -> dict[str, Any]:
    """Waits until a retry is in a worker; returns its raw message."""

    def find() -> dict[str, Any] | None:
        for raw in shop.redis.hvals("unacked"):
            message = json.loads(raw)[0]
            if message["headers"]["id"] == task_id and message["headers"]["retries"]:
                return message
        return None

    return eventually(find, f"task {task_id} waits for its retry")
