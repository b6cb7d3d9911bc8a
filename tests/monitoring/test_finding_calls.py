"""A call is found by what people know of it: its label, or the arguments that its key reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from celery_idempotent import Idempotency
from celery_idempotent.dashboard.index import Query
from tests.apps import close
from tests.monitoring.conftest import Shop, list_json
from tests.monitoring.shop import make_app
from tests.servers.redis_server import RedisServer

RULES: dict[str, Any] = {"template": "{number}", "names": ("number",)}


@pytest.fixture
def shop(server: RedisServer, client: Redis) -> Iterator[Shop]:
    """With a call of two tasks for the order A1, and others whose digests happen to contain it."""
    shop = Shop(make_app(server.url), client)

    def bill(number: str, amount: int, /, currency: str = "EUR") -> str:
        return number

    def pay(number: str, amount: int, currency: str = "EUR") -> str:
        return number

    for name, rule in RULES.items():
        shop.add_task(pay, f"shop.tasks.{name}", key=rule)
    shop.add_task(bill, "shop.tasks.bill", key="{number}", label="bill of order {number}")
    shop.add_task(pay, "shop.tasks.pay", key="{number}", label="order {number}")
    for number in ("A1", "B2"):
        for task in shop.app.tasks.values():
            if task.name.startswith("shop.tasks."):
                task.apply((number, 5), task_id=f"{task.name} {number}")
    raw = client.get(f"idem:{shop.app.tasks['shop.tasks.template'].idempotency_key_of('B2', 5)}")
    for count in range(20):
        client.set(f"idem:shop.tasks.template:{count:019d}a1-", raw)
    yield shop
    close(shop.app)


@pytest.mark.parametrize("name", RULES)
class TestByTheArgumentsThatTheRuleReads:
    def test_in_python(self, shop: Shop, name: str) -> None:
        task = shop.app.tasks[f"shop.tasks.{name}"]

        assert task.idempotency_record(number="A1").result == "A1"
        assert task.idempotency_record("A1").task_id == f"{task.name} A1"
        key = task.idempotency_key_of(number="A1")
        assert str(key) == str(task.idempotency_key_of("A1", 5))
        assert key.fingerprint == b""
        assert task.idempotency_forget(number="A1")
        assert task.idempotency_record("A1", 5) is None
        with pytest.raises(TypeError, match=rf"do not fit {task.name}: .*'number'"):
            task.idempotency_record(currency="EUR")
        with pytest.raises(TypeError, match=rf"fit {task.name}: .*'numbr'; did you mean number\?"):
            task.idempotency_record(numbr="A1")

    def test_in_the_command_line(self, shop: Shop, name: str) -> None:
        call = f"shop.tasks.{name}", '{"number": "A1"}'

        assert shop.json("show", *call)["result"] == "A1"
        explained = shop.json("explain", *call)
        assert explained["prediction"]["case"] == "replay"
        assert explained["missing"] == ["amount"]
        printed = shop.celery("explain", *call)
        assert "unknown: amount not given" in printed
        assert "; amount would be compared" in printed
        assert call[0] in shop.celery("show", call[0], '{"numbr": 1}', code=2)

    def test_of_a_function(self, shop: Shop, name: str) -> None:
        def pay(number: str, amount: int) -> str:
            return number

        function: Any = Idempotency(shop.app).idempotent(name="pay", key=RULES[name])(pay)

        assert str(function.idempotency_key_of("A1")) == str(function.idempotency_key_of("A1", 5))


@pytest.mark.parametrize(
    ("rule", "missing"),
    [
        (None, "express"),
        (lambda *args, **kwargs: f"{args} {kwargs}", "express"),
        ("{order}", "order"),
    ],
    ids=["none", "function", "template"],
)
def test_a_call_needs_the_arguments_that_its_key_reads(shop: Shop, rule: Any, missing: str) -> None:
    def ship(express: bool, order: int) -> None: ...

    task = shop.add_task(ship, "shop.ship", key=rule)

    with pytest.raises(TypeError, match=f"do not fit shop.ship: missing .*'{missing}'"):
        task.idempotency_record(**{"order": 42} if missing == "express" else {})


def test_a_publisher_and_a_worker_need_all_arguments(shop: Shop) -> None:
    positional = shop.app.tasks["shop.tasks.bill"]
    assert positional.idempotency_record("A1").result == "A1"
    result = positional.apply(("C3",))
    assert "do not fit shop.tasks.bill: missing a required" in str(result.result)


class TestByLabel:
    def test_list(self, shop: Shop) -> None:
        def tasks(*options: str) -> list[Any]:
            return sorted(record["task"] for record in list_json(shop, *options))

        assert tasks("--label", "ORDER a1") == ["shop.tasks.bill", "shop.tasks.pay"]
        assert tasks("--label", "a1") == ["shop.tasks.bill", "shop.tasks.pay"]
        assert len(tasks("--text", "a1")) == 24, "also in keys and task ids"
        assert tasks("--text", "tasks.bill A1") == ["shop.tasks.bill"]
        labels = {record.label for record in Idempotency(shop.app).records(label="a1")}
        assert labels == {"order A1", "bill of order A1"}

    def test_show(self, shop: Shop) -> None:
        assert shop.json("show", "Order A1")["task"] == "shop.tasks.pay"
        shop.add_task(other_task, "shop.more", key="{n}", label="order {n}").apply(("A1",))
        assert shop.celery("show", "order A1").count("order A1") == 2
        assert "no record has the task id or label" in shop.celery("show", "order", code=1)

    def test_forget(self, shop: Shop) -> None:
        cases = json.loads(shop.celery("forget", "--label", "order A1", "--yes", "--json"))

        assert [case["case"] for case in cases] == ["forgotten"] * 2
        assert list_json(shop, "--label", "A1") == []


def other_task(n: str) -> None: ...


def test_the_dashboard_shows_labels_and_tasks_before_digests(shop: Shop) -> None:
    def found(**query: str) -> list[str]:
        return [view.key.task for view in index.page(Query(**query), 100)]

    with shop.index() as index:
        by_text = found(text="A1")
        assert len(by_text) == 24
        assert sorted(by_text[:2]) == ["shop.tasks.bill", "shop.tasks.pay"]
        assert found(text="BILL")[:2] == ["shop.tasks.bill"] * 2
        assert sorted(found(label="A1")) == ["shop.tasks.bill", "shop.tasks.pay"]


def test_the_last_part_of_a_task_s_name_suggests_it(shop: Shop) -> None:
    for command in (("explain", "pay"), ("show", "pay"), ("explain", "payy")):
        assert "did you mean shop.tasks.pay?" in shop.celery(*command, "[1]", code=1)
    assert "did you mean shop.tasks.pay?" in shop.celery("list", "--task", "pay")
    shop.add_task(other_task, "more.pay")
    assert "did you mean more.pay or shop.tasks.pay?" in shop.celery("explain", "pay", code=1)
