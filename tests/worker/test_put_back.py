"""A message that is put back, or retried, is the one that came, but for its time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.waiting import SOON, eventually
from tests.worker.harness import Shop
from tests.worker.rescheduling import change_and_show
from tests.worker.shop import pack, report, silent, try_later

pytestmark = [pytest.mark.worker, pytest.mark.core]

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "its queue": {"queue": "other"},
    "its priority": {"priority": 3},
    "its headers": {"headers": {"label": "urgent", "tags": ["a", "b"]}},
    "hidden arguments": {"argsrepr": "<hidden>", "kwargsrepr": "<hidden>"},
    "another name in logs": {"shadow": "pack for a friend"},
    "its expiry": {"expires": 3600},
    "time limits": {"time_limit": 50, "soft_time_limit": 40},
    "one time limit": {"soft_time_limit": 40},
    "its serializer": {"serializer": "yaml"},
    "its compression": {"compression": "zlib"},
    "both": {"serializer": "yaml", "compression": "bzip2"},
    "where to reply": {"reply_to": "replies"},
    "in memory": {"delivery_mode": 1},
    "stamps": {"stamped_headers": ["customer"], "customer": "c-7"},
    "properties of AMQP": {"message_id": "m-1", "app_id": "till", "type": "order"},
    "what follows it": {"link": [report.si("linked", "-")], "link_error": [report.si("bad", "-")]},
    "its place in a canvas": {
        "root_id": "root",
        "parent_id": "parent",
        "group_id": "group",
        "group_index": 2,
        "replaced_task_nesting": 1,
        "chain": [report.si("next", "-")],
    },
    "that nobody wants its result": {"ignore_result": True},
}
WANTED = "that somebody wants its result"
#: What differs: the moment, the way through the broker, and what the gate notes.
CHANGES = ("eta", "retries", "idempotency")


def came_back(shop: Shop, task_id: str, times: int) -> dict[str, Any]:
    """The raw message of a task that waits in a worker after it was put back so many times."""

    def look() -> dict[str, Any] | None:
        for raw in shop.redis.hvals("unacked"):
            message = json.loads(raw)[0]
            noted = message["headers"].get("idempotency", "").split(".")
            if message["headers"]["id"] == task_id and len(noted) > 4 and int(noted[4]) == times:
                return message
        return None

    return eventually(look, f"task {task_id} has come back {times} times")


def in_the_queues(shop: Shop) -> dict[str, dict[str, Any]]:
    """The raw messages that wait to be delivered, by task id."""
    names = [name for name in shop.redis.scan_iter() if shop.redis.type(name) == b"list"]
    messages = [json.loads(raw) for name in names for raw in shop.redis.lrange(name, 0, -1)]
    return {message["headers"]["id"]: message for message in messages if "id" in message["headers"]}


def unlike(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is another in the message that came back, or is missing, or was not there before."""
    parts = (_headers, _properties, _outside)
    return {
        f"{part.__name__}: {name}": values
        for part in parts
        for name, values in _unlike(part(before), part(after)).items()
    }


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    names = {*one, *other}
    return {
        name: (one.get(name, "missing"), other.get(name, "missing"))
        for name in names
        if one.get(name, "missing") != other.get(name, "missing")
    }


def _headers(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message["headers"].items() if name not in CHANGES}


def _properties(message: dict[str, Any]) -> dict[str, Any]:
    # Celery makes properties of some headers, too. The expiry is in the headers.
    varying = ("delivery_tag", "expiration", "origin", "argsrepr", "kwargsrepr")
    properties = message["properties"].items()
    return {name: value for name, value in properties if name not in varying}


def _outside(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("body", "content-type", "content-encoding")}


class TestPutBack:
    @pytest.fixture(scope="class")
    @classmethod
    def messages(
        cls, open_shop: Callable[..., Shop]
    ) -> Iterator[dict[str, tuple[dict[str, Any], ...]]]:
        """As published, after one return and after three, of duplicates of one call."""
        with open_shop(accept_content=["json", "yaml"]) as shop:
            shop.start_worker("-Q", "first", concurrency=2)
            shop.ledger.hold("order")
            pack.apply_async(("order",), queue="first")
            silent.apply_async(("order",), queue="first")
            shop.ledger.wait_for_run("order", 2)
            for name, options in OPTIONS.items():
                pack.apply_async(("order",), {"amount": 1}, task_id=name, **options)
            silent.apply_async(("order",), task_id=WANTED, ignore_result=False)
            before = in_the_queues(shop)
            shop.start_worker("-Q", "celery,other", concurrency=2)
            once, thrice = (
                {name: came_back(shop, name, times) for name in before} for times in (1, 3)
            )
            shop.ledger.release("order")
            yield {name: (before[name], once[name], thrice[name]) for name in before}

    @pytest.mark.parametrize("name", [*OPTIONS, WANTED])
    def test_keeps(self, messages: dict[str, tuple[dict[str, Any], ...]], name: str) -> None:
        before, once, thrice = messages[name]

        assert unlike(before, once) == {}
        assert unlike(before, thrice) == {}


class TestRetried:
    """The same by Celery's own retry, through the task."""

    @pytest.fixture(scope="class")
    @classmethod
    def messages(
        cls, open_shop: Callable[..., Shop]
    ) -> Iterator[dict[str, tuple[dict[str, Any], ...]]]:
        """As published, and as retried."""
        with open_shop(accept_content=["json", "yaml"]) as shop:
            for name, options in OPTIONS.items():
                try_later.apply_async((name, 60), task_id=name, **options)
            before = in_the_queues(shop)
            shop.start_worker("-Q", "celery,other", concurrency=2)
            yield {name: (before[name], retried(shop, name)) for name in OPTIONS}

    @pytest.mark.parametrize("name", OPTIONS)
    def test_keeps(self, messages: dict[str, tuple[dict[str, Any], ...]], name: str) -> None:
        before, after = messages[name]

        assert unlike(before, after) == {}


def retried(shop: Shop, task_id: str) -> dict[str, Any]:
    """The raw message of a retry that waits in a worker for its time."""

    def look() -> dict[str, Any] | None:
        for raw in shop.redis.hvals("unacked"):
            message = json.loads(raw)[0]
            if message["headers"]["id"] == task_id and message["headers"]["retries"]:
                return message
        return None

    return eventually(look, f"task {task_id} waits for its retry")


def test_a_retry_with_other_arguments_shows_them_unless_they_are_hidden(
    open_shop: Callable[..., Shop], order: str
) -> None:
    with open_shop(imports=["tests.worker.rescheduling"]) as shop:
        shop.start_worker(concurrency=1)
        hidden = change_and_show.apply_async((order, 1), argsrepr="<hidden>")
        shown = change_and_show.apply_async((order, 3))

        assert hidden.get(timeout=SOON) == "<hidden>"
        assert shown.get(timeout=SOON) in (f"['{order}', 4]", f"('{order}', 4)")
