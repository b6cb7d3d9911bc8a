"""What docs/upgrading.md says about names, keys and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from celery_idempotent import IdempotentTask
from celery_idempotent.core.key import canonical
from celery_idempotent.core.record import layout
from tests.docs.pages import ROOT, block_with
from tests.waiting import SOON

PAGE = ROOT / "docs/upgrading.md"


def test_the_page_has_the_layout_of_this_version() -> None:
    row = f"\n| `{layout.VERSION}` | `{canonical.VERSION.decode()}` |"

    assert row in PAGE.read_text("utf-8")


@pytest.fixture
def unchanged_logging() -> Iterator[None]:
    """Keeps a worker in this process from replacing the root logger's handlers and level."""

    def leave_it(**_: Any) -> None: ...

    setup_logging.connect(leave_it)
    yield
    setup_logging.disconnect(leave_it)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchanged_logging")
def test_an_alias_has_the_keys_and_the_result_of_the_task(idempotency: Any) -> None:
    charged = []
    app = Celery("shop", backend="cache+memory://", broker="memory://", set_as_current=False)
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    names: dict[str, Any] = {"IdempotentTask": IdempotentTask, "app": app, "charged": charged}
    body = 'charged.append(amount); return f"charged {order_id}"'
    task = block_with(PAGE, 'name="shop.charge"').replace("...", body)
    task = task.replace("shop.charge", "upgrading.charge")  # other tests share that name
    exec(task.replace("@app.task(", "@app.task(shared=False, "), names)
    exec(block_with(PAGE, "self.replace(").replace("bind=True", "bind=True, shared=False"), names)

    with start_worker(app, perform_ping_check=False, shutdown_timeout=SOON):
        results = [
            names[task].delay(42, 999).get(timeout=SOON, interval=0.01)
            for task in ("charge_alias", "charge_order", "charge_alias")
        ]

    assert results == ["charged 42"] * 3
    assert charged == [999]
    app.close()


@pytest.mark.exhaustive
def test_what_another_until_does_to_outcomes_from_before(idempotency: Any) -> None:
    runs = []

    def body(order: int) -> int:
        runs.append(order)
        return len(runs)

    def task_with(until: str) -> Any:
        app = Celery("shop", backend="cache+memory://", broker="memory://", set_as_current=False)
        options = {"name": "upgrading.count", "idempotency_until": until}
        return app.task(body, base=IdempotentTask, shared=False, **options)

    expired, finished = task_with("expired"), task_with("finished")

    assert expired.apply((42,), task_id="first").get() == 1
    assert finished.apply((42,), task_id="second").get() == 2
    assert finished.apply((42,), task_id="second").get() == 2, "a copy of its message"
    assert expired.apply((42,), task_id="third").get() == 3
    assert expired.apply((42,), task_id="fourth").get() == 3
