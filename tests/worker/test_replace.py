"""A newer call takes the key from the running one: ``idempotency_on_conflict="replace"``."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain

from celery_idempotent import LeaseLostError
from celery_idempotent.errors import ReplacedError
from tests.waiting import SOON, eventually
from tests.worker.harness import COPIED_MESSAGES, Shop
from tests.worker.tasks import REPLACE, pack, replacing, replacing_in_bursts

TASKS = [replacing, replacing_in_bursts]


SHOP = {"idempotency_lease": 6.0, "task_annotations": REPLACE, **COPIED_MESSAGES}


def start(shop: Shop, order: str, call: Any) -> Any:
    """Publishes `call`, and returns when it runs, until ``order 1`` is released."""
    shop.ledger.hold(f"{order} 1")
    result = call.apply_async()
    shop.ledger.wait_for_run(order)
    return result


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("by", ["check", "step", "end"])
def test_the_older_call(shop: Shop, order: str, task: Any, by: str) -> None:
    older = start(shop, order, chain(task.si(order, 1, by=by), pack.si(f"after {order}")))
    newer = task.delay(order, 2)

    assert newer.get(timeout=SOON)["amount"] == 2
    if by != "check":
        line = f"{older.parent.id} (attempt 1) the key was taken over"
        eventually(lambda: line in shop.workers[0].logs(), "it learns of it")
        shop.ledger.release(f"{order} 1")
    with pytest.raises(ReplacedError, match=newer.id) as raised:
        older.parent.get(timeout=SOON)
    assert raised.value.task_id == newer.id
    assert isinstance(raised.value, LeaseLostError)
    ends = [run.end for run in shop.ledger.runs(order)]
    assert ends == ["returned" if by == "end" else "ReplacedError", "returned"]
    shop.ledger.release_all()
    shop.wait_until_empty()
    assert len(shop.ledger.runs(order)) == 2, "its copies do not run"
    assert "step" not in shop.ledger.notes(order)
    assert not shop.ledger.runs(f"after {order}"), "its continuation is not sent"
    record = task.idempotency_record(order)
    assert record is not None
    assert (record.task_id, record.result["amount"]) == (newer.id, 2)


def test_a_body_that_never_asks_runs_on(shop: Shop, order: str) -> None:
    shop.ledger.hold(order)
    older = replacing.delay(order, 1, by="nothing")
    shop.ledger.wait_for_run(order)
    newer = replacing.delay(order, 2)
    shop.ledger.wait_for_run(order, 2)
    shop.ledger.release(order)

    assert newer.get(timeout=SOON)["amount"] == 2
    with pytest.raises(ReplacedError):
        older.get(timeout=SOON)
    tokens = [run.token for run in shop.ledger.runs(order)]
    assert tokens == sorted(set(tokens))
