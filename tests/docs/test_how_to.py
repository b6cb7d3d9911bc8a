"""The code of the how-to guides does what the guides say, on a real server."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import celery
import httpx
import pytest
from celery import Celery
from celery.beat import Scheduler
from fastapi import Depends, FastAPI, Request
from freezegun import freeze_time
from kombu.transport.redis import Channel

from celery_idempotent import TASK_ID, Idempotency, IdempotentTask, KeyReusedError, State, signals
from celery_idempotent.testing import IsolatedRecords
from examples.burst.tasks import index
from examples.one_at_a_time.tasks import synchronize
from tests.docs.pages import README, ROOT, block_with, python_blocks

pytestmark = pytest.mark.usefixtures("idempotency")

#: No server listens there: the records are those of the fixture `idempotency`.
ELSEWHERE = "redis://127.0.0.1:1/0"

Run = Callable[..., dict[str, Any]]


class Calls(list[Any]):
    """A system outside, such as a payment provider, that notes each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.append((*args, kwargs) if kwargs else args)
        return f"reply {len(self)}"

    #: The names under which the pages call it.
    charge = compute = __call__


def eager_app(*args: Any, **kwargs: Any) -> Celery:
    kwargs = {"broker": ELSEWHERE, "backend": ELSEWHERE, "set_as_current": False} | kwargs
    app = Celery(*args, **kwargs)
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    return app


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the Python blocks of a page or a section, with eager apps; returns their names."""
    monkeypatch.setattr(celery, "Celery", eager_app)

    def run(page: str, title: str = "", containing: str = "", **names: Any) -> dict[str, Any]:
        names |= {"__name__": "shop", "IdempotentTask": IdempotentTask, "TASK_ID": TASK_ID}
        names.setdefault("app", eager_app("shop"))
        for block in python_blocks(ROOT / f"docs/{page}.md", title):
            if containing in block:
                exec(block.replace("@app.task(", "@app.task(shared=False, "), names)
        return names

    return run


def post(api: FastAPI, url: str, **options: Any) -> httpx.Response:
    """Sends a request to an ASGI app in an event loop of its own."""

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(url, **options)

    return asyncio.run(post())


def options_of(task: Any) -> Any:
    return task.idempotency_configuration.settings


def test_the_first_example_charges_once_until_its_record_is_forgotten(run: Run) -> None:
    gateway = Calls()
    names = run("../README", containing='Celery("shop"', gateway=gateway)
    first, duplicate, reused = block_with(README, "# another task id, the same result").splitlines()

    assert eval(first, names) == eval(duplicate, names) == "reply 1"
    with pytest.raises(KeyReusedError):
        eval(reused, names)
    assert gateway == [(42, 999)]

    names = run("reference/task", containing="record = charge.", **names)
    assert names["record"].result == "reply 1"
    assert names["charge"].delay(42, amount=999).get() == "reply 2"
    assert gateway == [(42, 999)] * 2


class TestChargeOnce:
    class CardDeclinedError(Exception):
        pass

    def test_a_duplicate_does_not_charge(self, run: Run) -> None:
        gateway = Calls()
        charge = run("modes", "Once", gateway=gateway, CardDeclinedError=Exception)["charge"]

        ((order, amount, options),) = gateway
        assert (order, amount) == (42, 999)
        assert options == {"idempotency_key": str(charge.idempotency_key_of(42, amount=999))}
        with pytest.raises(KeyReusedError):
            charge.delay(42, amount=500)

    def test_a_declined_card_stays_declined(self, run: Run) -> None:
        gateway = Calls()
        names = run("modes", "Once", gateway=gateway, CardDeclinedError=self.CardDeclinedError)

        def decline(*args: Any, **_: Any) -> None:
            gateway.append(args)
            raise self.CardDeclinedError("no funds")

        names["gateway"] = SimpleNamespace(charge=decline)
        for _ in range(2):
            with pytest.raises(self.CardDeclinedError):
                names["charge"].delay(43, amount=1)
        assert gateway[1:] == [(43, 1)]


class TestOneAtATime:
    def test_every_call_runs(self, run: Run) -> None:
        fetch = Calls()
        names = run("modes", "One at a time", fetch=fetch)

        assert fetch == [("ada@example.org",)] * 2 + [("grace@example.org",)]
        # The example, whose calls a worker runs.
        assert options_of(names["synchronize"]) == options_of(synchronize)


def test_a_burst_is_one_message(run: Run) -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    try:
        names = run("modes", "Bursts", app=app)  # which asserts that it is one
    finally:
        app.close()

    assert options_of(names["index"]) == replace(options_of(index), dedupe_publish=None)


class TestPeriodicTasks:
    @pytest.fixture
    def mailed(self) -> Calls:
        return Calls()

    @pytest.fixture
    def names(self, run: Run, mailed: Calls) -> dict[str, Any]:
        return run("modes", "Periodic tasks", send_report=mailed, time=time)

    def test_each_message_of_one_beat_runs_once(self, names: dict[str, Any], mailed: Calls) -> None:
        for message in ("monday", "tuesday"):
            for _redelivery in range(2):
                names["mail"].apply(task_id=message)
        assert len(mailed) == 2

    def test_two_beats_mail_one_report_a_day(self, names: dict[str, Any], mailed: Calls) -> None:
        """Their clocks may differ by less than half a period."""
        app = names["app"]
        for day in ("2026-11-23", "2026-11-24"):
            for at in ("06:30:01", "07:00:00", "07:29:59"):
                with freeze_time(f"{day} {at}"):
                    scheduler = Scheduler(app, lazy=True)
                    entry = scheduler.Entry(name="mail", app=app, task="reports.mail_once")
                    scheduler.apply_async(entry, advance=False)
        assert len(mailed) == 2


def test_a_webhook_is_handled_once(run: Run) -> None:
    booked, api = Calls(), FastAPI()
    event = {"id": "evt_1", "amount": 999}
    run("modes", "Webhooks", api=api, book=booked, Request=Request, verified=lambda *_: event)
    for _ in range(2):
        assert post(api, "/webhooks/payments").status_code == 202
    assert booked == [({"id": "evt_1", "amount": 999},)]

    event["amount"] = 1
    with pytest.raises(KeyReusedError):
        post(api, "/webhooks/payments")


def test_tenants_never_meet(run: Run) -> None:
    gateway = Calls()
    charge = run("modes", "Tenants", gateway=gateway)["charge_order"]
    del gateway[:]

    for tenant, order in (("a", "bc"), ("ab", "c"), ("b", "bc")):
        charge.delay(tenant, order, 1)
    for tenant in ("acme", "other"):
        charge.apply_async((tenant, 42, 999), idempotency_key=(tenant, "req-1"))

    assert [tenant for tenant, _, _ in gateway] == ["a", "ab", "b", "acme", "other"]


def test_the_options_of_the_broker_exist(run: Run) -> None:
    app, published = eager_app("shop"), Calls()
    run("choosing-times", app=app, charge=SimpleNamespace(apply_async=published))

    named = set(app.conf.broker_transport_options)
    if not hasattr(Channel, "unacked_restore_interval"):  # before kombu 5.7
        named -= {"unacked_restore_interval", "unacked_restore_throttle"}
    assert [name for name in named if not hasattr(Channel, name)] == []
    assert len(published) == 1


@pytest.mark.parametrize("title", ["FastAPI, Starlette", "Flask"])
def test_a_retry_of_a_request_gets_the_first_response(run: Run, title: str) -> None:
    gateway = Calls()
    names = run("http", title, gateway=gateway)
    send = names["web"].test_client().post if title == "Flask" else partial(post, names["api"])
    headers = {"Authorization": "Bearer alice", "Idempotency-Key": "8e03978e"}

    first, retry = (send("/payments", json={"amount": 999}, headers=headers) for _ in range(2))

    assert first.status_code == retry.status_code == 202
    assert "Idempotency-Replayed" not in first.headers
    assert retry.headers["Idempotency-Replayed"] == "true"
    assert len(gateway) == 1


def test_a_retry_of_one_endpoint_gets_the_first_response() -> None:
    (block,) = (b for b in python_blocks(ROOT / "docs/http.md") if "import idempotent_route" in b)
    api = FastAPI()
    names = {"api": api, "idem": Idempotency(ELSEWHERE, name="payments-api"), "Depends": Depends}
    names |= {"Annotated": Annotated, "Payment": dict[str, int], "User": SimpleNamespace}
    names["current_user"] = lambda: SimpleNamespace(id=7)
    exec(block, names)
    send = partial(post, api, "/orders/1/payments", headers={"Idempotency-Key": "8e03978e"})
    first, retry = (send(json={"amount": 999}) for _ in range(2))

    assert (first.status_code, retry.status_code) == (201, 201)
    assert retry.headers["Idempotency-Replayed"] == "true"


def test_a_pager_is_connected(run: Run) -> None:
    triggered = Calls()
    names = run("monitoring", "Dashboards and alerts", pager=SimpleNamespace(trigger=triggered))
    try:
        signals.lease_lost.send(index, task_id="1", key="index:2")
    finally:
        for signal in (signals.lease_lost, signals.outcome_unsaved):
            signal.disconnect(names["page"])

    assert triggered == [("task 1: effects of index:2 may be doubled",)]


def test_the_figures_are_about_those_measured() -> None:
    row = r"^\| (?:one record, result of )?([\d,]+) bytes \| ([\d,]+)"

    def figures(page: str) -> dict[str, int]:
        rows = re.findall(row, (ROOT / "docs" / page).read_text("utf-8"), flags=re.M)
        return {size: int(figure.replace(",", "")) for size, figure in rows}

    about, measured = figures("redis-configuration.md"), figures("contributing/benchmarks.md")
    assert len(about) == 4
    for size, figure in about.items():
        assert figure == pytest.approx(measured[size.replace(",", "")], rel=0.1), size


def test_a_finished_step_is_not_repeated(run: Run) -> None:
    charged, booked = Calls(), Calls()

    def book(order_id: int) -> str:
        if not booked:
            booked(order_id)
            raise TimeoutError
        return booked(order_id)

    ship = run("reference/task", "Steps", charge=charged, book=book)["ship"]
    with pytest.raises(TimeoutError):
        ship.delay(42, 999)

    assert ship.delay(42, 999).get() == {"payment": "reply 1", "parcel": "reply 2"}
    assert len(charged) == 1


def test_a_write_with_a_lower_token_changes_nothing(
    run: Run, tmp_path: Path, idempotency: IsolatedRecords
) -> None:
    database = sqlite3.connect(tmp_path / "totals.sqlite")
    database.execute("CREATE TABLE totals (day TEXT, amount INTEGER, token INTEGER)")
    database.execute("INSERT INTO totals VALUES ('monday', 0, 0)")
    writes: list[tuple[str, dict[str, Any]]] = []

    def write(statement: str, values: dict[str, Any]) -> None:
        writes.append((statement, values))
        assert database.execute(statement, values).rowcount == 1

    total = run("reference/task", "Fencing tokens", write=write, add_up=len)["total"]
    total.delay("monday")

    ((statement, values),) = writes
    assert total.idempotency_record("monday").state is State.COMPLETED
    assert database.execute(statement, {**values, "token": values["token"] - 1}).rowcount == 0
    database.close()


def test_adopting(run: Run, idempotency: IsolatedRecords) -> None:
    names = run("adopting")
    reports = Calls()

    def report(day: str) -> None:
        reports(day)

    report = names["app"].task(report, shared=False)
    for _ in range(2):
        names["charge"].delay(42, amount=999)
        report.delay("monday")

    assert idempotency.executions(names["charge"], 42, amount=999) == 1
    assert reports == [("monday",)] * 2
    assert names["ShopTask"].delay_on_commit
