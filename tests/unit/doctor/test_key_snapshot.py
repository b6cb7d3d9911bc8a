"""Snapshots of keys, and what `doctor --against` finds in them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent import TASK_ID
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.operations.doctor import Finding, key_snapshot
from tests.unit.conftest import shop, task_in

BY_ORDER = {"idempotency_key": "order:{order_id}"}


def charge(order_id: int, amount: int, currency: str = "EUR") -> None: ...


def snapshot(function: Any = charge, **options: Any) -> str:
    """Returns what the command `keys` prints for one task."""
    app = shop()
    task_in(app, function, **options)
    return json.dumps(key_snapshot.document_of(app_tasks.enabled(app)))


def findings(before: str, function: Any = charge, **options: Any) -> list[Finding]:
    """Returns the findings for one task whose code was another one."""
    app = shop()
    task_in(app, function, **options)
    return list(key_snapshot.check(app, key_snapshot.read(before)))


def names(findings: list[Finding]) -> list[str]:
    assert all("\n" not in finding.line for finding in findings)
    return [finding.name for finding in findings]


def amount_first(amount: int, order_id: int, currency: str = "EUR") -> None: ...
def renamed(order: int, amount: int, currency: str = "EUR") -> None: ...
def total(order_id: int, total: int, currency: str = "EUR") -> None: ...
def in_dollars(order_id: int, amount: int, currency: str = "USD") -> None: ...
def with_note(order_id: int, amount: int, currency: str = "EUR", note: str = "") -> None: ...
def with_tenant(order_id: int, amount: int, tenant: str, currency: str = "EUR") -> None: ...


class TestChanges:
    @pytest.mark.parametrize(
        ("rule", "function", "new_rule", "expected"),
        [
            (BY_ORDER, charge, BY_ORDER, ""),
            (BY_ORDER, with_note, BY_ORDER, ""),
            ({}, with_note, {}, ""),
            ({"idempotency_shadow": True}, charge, {}, ""),
            (BY_ORDER, charge, {"idempotency_key": "o:{order_id}"}, "keys"),
            (BY_ORDER, charge, {"idempotency_key": ("order_id",)}, "keys"),
            (BY_ORDER, charge, {**BY_ORDER, "idempotency_key_prefix": "x"}, "keys"),
            (BY_ORDER, amount_first, BY_ORDER, "keys"),
            ({}, total, {}, "keys"),
            (BY_ORDER, renamed, {"idempotency_key": "order:{order}"}, "fingerprints"),
            ({"idempotency_key": ("order_id",)}, renamed, {"idempotency_key": ("order",)},
             "fingerprints"),
            (BY_ORDER, total, BY_ORDER, "fingerprints"),
            (BY_ORDER, with_tenant, BY_ORDER, "accepted calls, fingerprints"),
            ({}, in_dollars, {}, "defaults"),
            ({"idempotency_key": "{currency}"}, in_dollars, {"idempotency_key": "{currency}"},
             "defaults, keys"),
            ({"idempotency_key": TASK_ID}, total, {"idempotency_key": TASK_ID}, ""),
            ({"idempotency_key": "{order_id}{amount}"}, charge,
             {"idempotency_key": "{amount}{order_id}"}, "keys"),
        ],
    )  # fmt: skip
    def test_a_change_of_the_code_is_found_if_keys_change(
        self, rule: dict[str, Any], function: Any, new_rule: dict[str, Any], expected: str
    ) -> None:
        found = findings(snapshot(**rule), function, **new_rule)

        assert names(found) == ["keys-changed"] * bool(expected)
        assert all(each.what.startswith(f"its {expected} differ from") for each in found)

    def test_the_finding_names_what_has_changed(self) -> None:
        (finding,) = findings(
            snapshot(**BY_ORDER), renamed, idempotency_key="o:{order}", idempotency_result_ttl=600
        )

        assert "rule: the template 'order:{order_id}' → the template 'o:{order}'" in finding.what
        assert "parameters: order_id, amount, currency → order, amount, currency" in finding.what
        assert "600 s" in finding.why

    def test_the_code_of_a_callable_rule_is_compared_by_its_keys(self) -> None:
        def by_order(order_id: int, amount: int, currency: str = "EUR") -> Any:
            return order_id

        before = snapshot(idempotency_key=by_order)
        assert findings(before, idempotency_key=lambda order_id, *_, **__: order_id) == []

        by_order.__code__ = (lambda order_id, amount, currency="EUR": amount).__code__
        assert names(findings(before, idempotency_key=by_order)) == ["keys-changed"]

    def test_a_task_that_vanishes_is_found(self) -> None:
        app = shop()
        task_in(app, charge, name="shop.pay")

        (removed,) = key_snapshot.check(app, key_snapshot.read(snapshot()))

        assert (removed.name, removed.subject) == ("task-removed", "shop.charge")

    def test_a_disabled_task_is_not_compared(self) -> None:
        assert findings(snapshot(), total, idempotency_enabled=False) == []

    def test_a_rule_that_raises_for_the_samples_is_noted(self) -> None:
        rule = {"idempotency_key": "{order_id.id}"}

        (finding,) = findings(snapshot(**rule), **rule)

        assert (finding.name, str(finding.severity)) == ("keys-unknown", "note")


class TestSnapshot:
    def test_it_is_the_same_each_time(self) -> None:
        assert snapshot() == snapshot()

    def test_arguments_are_made_of_the_types(self) -> None:
        def ship(
            order: UUID, when: datetime | None, weights: list[float], gift: bool = True
        ) -> None: ...

        (snapshot_of_task,) = key_snapshot.read(snapshot(ship)).values()

        required, all_arguments = snapshot_of_task.samples
        assert [type(value) for value in required.args] == [UUID, datetime, list]
        assert all_arguments.args[-1] is False, "not the default"
        assert findings(snapshot(ship), ship) == []

    @pytest.mark.parametrize(
        "rule", ["{order[id]}:{tenant}", lambda order, **_: order["id"] + order["tenant"]]
    )
    @pytest.mark.parametrize("kind", [Any, dict, dict[str, int]], ids=str)
    def test_items_that_the_rule_reads_are_found(self, rule: Any, kind: Any) -> None:
        def ship(order: Any, **others: Any) -> None: ...

        ship.__annotations__["order"] = kind
        (snapshot_of_task,) = key_snapshot.read(snapshot(ship, idempotency_key=rule)).values()

        (call,) = snapshot_of_task.samples
        assert call.args[0]["id"]

    def test_it_contains_no_defaults(self) -> None:
        def login(user: str, token: str = "hunter2") -> None: ...

        assert "hunter2" not in snapshot(login)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"celery_idempotent_keys": 2, "tasks": {}}',
            '{"celery_idempotent_keys": 1, "tasks": []}',
            '{"celery_idempotent_keys": 1, "tasks": {"a": {"samples": [7]}}}',
            '{"celery_idempotent_keys": 1, "tasks": {"a": {"rule": "", "samples": []}}}',
            "[" * 100_000,
        ],
    )
    def test_another_document_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"^\w+: .*$"):
            key_snapshot.read(text)
