"""``idempotency_label``: a readable name beside the key, wherever people look at records."""

from __future__ import annotations

from typing import Any

from celery_idempotent import Idempotency
from tests.monitoring.conftest import Shop, list_json


def add_refund(shop: Shop, label: str = "order {order_id}", **options: Any) -> Any:
    def refund(order_id: Any, amount: int = 0) -> int:
        return amount

    return shop.add_task(refund, "shop.refund", key="refund:{order_id}", label=label, **options)


def test_list_and_show_print_labels(shop: Shop) -> None:
    add_refund(shop).apply((42,))
    shop.charge.apply((1, 999))

    header, *lines = shop.celery("list").splitlines()

    column = header.index("LABEL")
    assert sorted(line[column:].split("  ")[0].strip() for line in lines) == ["", "order 42"]
    assert [len(line[: line.index("shop.")]) for line in lines] == [header.index("KEY")] * 2
    labels = {record["task"]: record["label"] for record in list_json(shop)}
    assert labels == {"shop.refund": "order 42", "shop.charge": ""}
    assert shop.json("show", "shop.refund", "[42]")["label"] == "order 42"
    assert shop.json("explain", "shop.refund", "[42]")["record"]["label"] == "order 42"
    shown = shop.celery("show", "shop.refund", "[42]").splitlines()
    assert ["label", "order", "42"] in [line.split() for line in shown]
    assert "label" not in shop.celery("show", "shop.charge", "[1, 999]")


def test_functions_and_blocks_have_labels(shop: Shop) -> None:
    idem = Idempotency(shop.app)

    @idem.idempotent(name="shop.ship", key="{order[id]}", label="parcel {order[id]}")
    def ship(order: dict[str, int], express: bool = False) -> int:
        return order["id"]

    ship({"id": 7})
    with idem.execution("req-1", label="request\n1") as execution:
        execution.complete(1)

    labels = {record.task: record.label for record in idem.records()}
    assert labels == {"shop.ship": "parcel 7", "calls": "request\\x0a1"}
    idem.close()


def test_a_reservation_has_its_label(shop: Shop) -> None:
    shop.app.conf.task_always_eager = False
    refund = add_refund(shop, dedupe_publish=True)

    refund.delay(42)

    assert refund.idempotency_record(42).label == "order 42"
