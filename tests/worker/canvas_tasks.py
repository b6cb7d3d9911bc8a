"""Tasks that are replaced, followed by others, made of steps, or that publish others."""

from __future__ import annotations

import json
import os
import signal
from typing import Any
from uuid import uuid4

from celery import chain, group, shared_task

from celery_idempotent import IdempotentTask
from tests.worker.ledger import Ledger, recorded_run
from tests.worker.tasks import OutOfStockError, flaky, pack, silent


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over")
def hand_over(self: Any, order: str, to: str = "pack") -> None:
    """Replaces itself by another task; one may fail, and the result of others is ignored."""
    with recorded_run(self, order):
        other = {"flaky": flaky, "silent": silent}.get(to, pack)
        options = {"ignore_result": True} if to == "ignored" else {}
        self.replace(other.s(f"replacement of {order}").set(**options))


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over_badly")
def hand_over_badly(self: Any, order: str) -> str:
    """Replaces itself by a task that cannot be serialized; returns in the second execution."""
    with recorded_run(self, order) as ledger:
        if len(ledger.runs(order)) == 1:
            self.replace(pack.s(object()))
        return "handled here"


PARTS = ("charge", "book", "mail")


@shared_task(bind=True, base=IdempotentTask, name="shop.ship")
def ship(self: Any, order: str, after: str = "", way: str = "") -> list[str]:
    """Ships an order in three steps; `after` one of them, the first execution ends."""
    with recorded_run(self, order) as ledger:
        first = len(ledger.runs(order)) == 1
        values = []
        for part in PARTS:
            values.append(self.idempotency.step(part, _do_part, ledger, order, part))
            if first and part == after:
                _interrupt(self, order, way)
        return values


def _do_part(ledger: Ledger, order: str, part: str) -> str:
    ledger.note(order, part)
    ledger.wait_for_release(f"{part} of {order}")
    return f"{part} {uuid4().hex}"


def _interrupt(task: Any, order: str, way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "retry":
        raise task.retry(countdown=0)
    raise OutOfStockError(order, 3)


@shared_task(bind=True, base=IdempotentTask, name="shop.follow_up")
def follow_up(self: Any, receipt: Any, order: str) -> Any:
    """Follows another task, with its result."""
    Ledger.of(self.app).note(order, "followed up")
    return [receipt, order]


@shared_task(bind=True, name="shop.report")
def report(self: Any, receipts: Any, order: str) -> Any:
    """A plain Celery task at the end of a canvas."""
    Ledger.of(self.app).note(order, json.dumps(receipts))
    return receipts


ITEMS = 5


@shared_task(bind=True, base=IdempotentTask, name="shop.fan_out", idempotency_key="{order}")
def fan_out(self: Any, order: str, way: str, item: int | None = None, after: str = "") -> None:
    """Publishes a child for each of five items, with the headers of its own message."""
    ledger = Ledger.of(self.app)
    if item is not None:
        ledger.note(order, str(item))
        return
    with recorded_run(self, order):
        if after == "retry" and self.request.retries == 0:
            raise self.retry(countdown=0)
        _send_children(self, order, way)


def _send_children(task: Any, order: str, way: str) -> None:
    headers = task.request.headers
    children = [f"{item} {order}" for item in range(ITEMS)]
    if way == "group":
        group(pack.s(child) for child in children).apply_async(headers=headers)
        return
    for item, child in enumerate(children):
        if way == "apply_async":
            pack.apply_async((child,), headers=headers)
        elif way == "by name":
            task.app.send_task("shop.pack", (child,), headers=headers)
        elif way == "signature":
            chain(pack.s(child).set(headers=headers), report.s(child)).delay()
        elif way == "plain task":
            relay.apply_async((child,), headers=headers)
        elif way == "eager":
            pack.apply((child,), headers=headers).get(disable_sync_subtasks=False)
        elif way == "itself":
            task.app.tasks["shop.fan_out"].apply_async((child, way, item), headers=headers)


@shared_task(bind=True, name="shop.relay")
def relay(self: Any, order: str) -> None:
    """A plain Celery task that forwards its headers."""
    pack.apply_async((order,), headers=self.request.headers)
