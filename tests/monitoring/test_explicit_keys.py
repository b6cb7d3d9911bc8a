"""The command line finds and marks records of keys that callers have brought."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_idempotent import Idempotency
from tests.monitoring.conftest import Shop, list_json


@pytest.fixture
def keys(shop: Shop) -> dict[str, str]:
    """The keys of a call under the rule, of one with an explicit key, and of one with a tuple."""
    shop.charge.apply((42, 999), task_id="by-rule")
    key_of = shop.charge.idempotency_key_of
    keys = {"by-rule": key_of(42, 999)}
    for task_id, own in {"by-text": "order:42", "by-tuple": ("acme", "order:42")}.items():
        shop.charge.apply((42, 999), task_id=task_id, idempotency_key=own)
        keys[task_id] = key_of(idempotency_key=own)
    return {task_id: str(key) for task_id, key in keys.items()}


def test_list_marks_them(shop: Shop, keys: dict[str, str]) -> None:
    listed = {record["task_id"]: (record["key"], record["explicit"]) for record in list_json(shop)}

    assert listed == {name: (key, name != "by-rule") for name, key in keys.items()}
    lines = shop.celery("list").splitlines()
    assert sum(":~" in line for line in lines) == 2
    assert {record.explicit for record in Idempotency(shop.app).records()} == {True, False}
    shop.client.set("idem:shop.charge:~" + "x" * 22, "Znewer")
    (unreadable,) = list_json(shop, "--state", "CORRUPT")
    assert unreadable["explicit"]


@pytest.mark.parametrize(
    ("names", "task_id"),
    [
        (("shop.charge", "[42, 999]"), "by-rule"),
        (("shop.charge", "--key", "order:42"), "by-text"),
        (("shop.charge", "--key", "acme", "--key", "order:42"), "by-tuple"),
        (("by-text",), "by-text"),
        (("KEY by-text",), "by-text"),
        (("idem:KEY by-tuple",), "by-tuple"),
    ],
)
def test_show_and_forget_find_them(
    shop: Shop, keys: dict[str, str], names: tuple[str, ...], task_id: str
) -> None:
    command = [name.replace(f"KEY {task_id}", keys[task_id]) for name in names]

    shown = shop.json("show", *command)
    forgotten = shop.json("forget", *command, "--yes")

    assert (shown["task_id"], shown["explicit"]) == (task_id, task_id != "by-rule")
    assert shown["result"] == {"order": 42, "amount": 999}
    assert forgotten == [{"key": keys[task_id], "case": "forgotten"}]
    assert {record["task_id"] for record in list_json(shop)} == {*keys} - {task_id}


def test_explain_answers_for_the_key_of_the_call(shop: Shop, keys: dict[str, str]) -> None:
    by_rule = shop.json("explain", "shop.charge", "[42, 999]")
    explained = shop.json("explain", "shop.charge", "[42, 999]", "--key", "order:42")

    assert (by_rule["key"], by_rule["explicit"]) == (keys["by-rule"], False)
    assert (explained["key"], explained["explicit"]) == (keys["by-text"], True)
    assert explained["rule"] == "idempotency_key of the call"
    assert explained["prediction"]["sentence"] == "replays the result of task by-text"
    assert [argument["in_key"] for argument in explained["arguments"]] == [False] * 3
    printed = shop.celery("explain", "shop.charge", "[42, 999]", "--key", "order:42")
    assert "never equals a key that the task's rule derives" in " ".join(printed.split())
    assert "never equals" not in shop.celery("explain", "shop.charge", "[42, 999]")


def test_explain_rejects_a_key_that_a_call_could_not_bring(shop: Shop) -> None:
    for command in ("explain", "show"):
        output = shop.celery(command, "shop.charge", "[42, 999]", "--key", "x" * 256, code=1)
        assert output.startswith("Error: shop.charge: idempotency_key has 256 characters, and 255 ")
        assert output.endswith(" are allowed: pass a digest of it\n")


def test_their_offloaded_results_are_read_and_deleted(shop: Shop, tmp_path: Path) -> None:
    task = shop.add_offloading_task(tmp_path)
    task.apply(idempotency_key="req-7f3a")

    (stored,) = tmp_path.iterdir()
    assert str(task.idempotency_key_of(idempotency_key="req-7f3a")) in stored.name
    assert shop.json("show", "shop.scan", "--key", "req-7f3a")["result"] == "x" * 1_000
    shop.celery("forget", "shop.scan", "--key", "req-7f3a", "--yes")
    assert list(tmp_path.iterdir()) == []
