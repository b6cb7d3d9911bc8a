"""What an operator gets of each thing that happens to a call: the table of docs/reporting.md.

Each row happens to a real worker, whose log is JSON, whose Sentry events are captured, and whose
events and metrics are read. ``pytest -rP`` prints what each row produced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import celery
import pytest

pytest.importorskip("sentry_sdk")
pytest.importorskip("pythonjsonlogger")

from celery_idempotent.events.table import REFUSED_FOR
from tests.servers.ports import Ports
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker import reporting
from tests.worker.harness import Shop
from tests.worker.monitor import Monitor
from tests.worker.reported_rows import LINE, ROWS, Row, Scene
from tests.worker.shop import REPORTS_VARIABLE

pytestmark = [pytest.mark.worker, pytest.mark.slow]

GUIDE = Path(__file__).parents[2] / "docs" / "reporting.md"
CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Ports(1) as ports:
        yield ports.numbers[0]


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    """The records' own server, which goes away."""
    with RedisServer.start(config={}) as store:
        yield store


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def shared_shop(
    open_shop: Callable[..., Shop], store: RedisServer, reports: Path, port: int
) -> Iterator[Shop]:
    with open_shop(
        idempotency_redis_url=store.url, idempotency_metrics=f"127.0.0.1:{port}"
    ) as shop:
        shop.start_worker("--task-events", concurrency=2, **{REPORTS_VARIABLE: str(reports)})
        yield shop


@pytest.fixture(scope="module")
def monitor(shared_shop: Shop) -> Iterator[Monitor]:
    monitor = Monitor(shared_shop)
    yield monitor
    monitor.stop()


class Observer:
    """Reads what was reported of one task id."""

    def __init__(self, shop: Shop, monitor: Monitor, reports: Path, port: int) -> None:
        self._shop, self._monitor, self._reports, self._port = shop, monitor, reports, port

    def lines(self, task_id: str) -> list[dict[str, Any]]:
        """The package's lines."""
        records = reporting.log(self._reports)
        return [
            r
            for r in records
            if r["name"].startswith("celery_idempotent") and r.get("idempotency_task_id") == task_id
        ]

    def celerys_lines(self, task_id: str) -> list[dict[str, Any]]:
        """The lines of Celery's tracer."""
        records = reporting.log(self._reports)
        return [
            r
            for r in records
            if r["name"] == "celery.app.trace" and r.get("data", {}).get("id") == task_id
        ]

    def signals(self, task_id: str) -> set[str]:
        return {signal.name for signal in self._shop.ledger.signals(task_id)}

    def events(self, task_id: str) -> set[str]:
        return {e["type"] for e in self._monitor.received if e.get("uuid") == task_id}

    def sentry(self, task_id: str) -> list[str]:
        """The types of the errors, or the levels of the lines."""
        return [
            event["exception"]["values"][-1]["type"] if "exception" in event else LINE
            for event in reporting.sentry_events(self._reports)
            if event.get("tags", {}).get("celery_task_id") == task_id
        ]

    def counts(self) -> dict[tuple[str, str], float]:
        """The counters by task and decision, outcome, or reason of refusals."""
        with urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=SOON) as response:
            text = response.read().decode()
        found = {}
        for family, labels, value in re.findall(
            r"^celery_idempotent_(\w+)_total\{(.*?)\} (\S+)$", text, re.MULTILINE
        ):
            named = dict(re.findall(r'(\w+)="(.*?)"', labels))
            task = named.pop("task")
            name = REFUSED_FOR * (family == "refused") + "".join(named.values())
            found[task, name] = float(value)
        return found


@pytest.fixture
def observer(shared_shop: Shop, monitor: Monitor, reports: Path, port: int) -> Observer:
    return Observer(shared_shop, monitor, reports, port)


#: Sent by Celery before a task ends.
BEFORE = {"task-received", "task-started"}
#: Counted for what precedes a row.
PREPARATION = {"run", "completed", "failed", "not_stored"}
FIELDS = {f"idempotency_{name}" for name in ("key", "task_id", "decision", "token", "attempt")}


def matches(text: str, line: dict[str, Any], level_and_text: tuple[str, str]) -> bool:
    level, template = level_and_text
    pattern = ".+".join(map(re.escape, template.split("…")))
    return line["levelname"] == level and re.fullmatch(pattern, text, re.DOTALL) is not None


def text_of(line: dict[str, Any]) -> str:
    """Returns the text after the call that the line begins with."""
    prefix = r"shop\.[\w:~-]+: task [\w-]+(?: \(attempt \d+\))? "
    text, found = re.subn(rf"\A{prefix}", "", line["message"])
    assert found, line
    return text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_row(row: Row, shop: Shop, store: RedisServer, observer: Observer, order: str) -> None:
    if "task-rejected" in row.events and row.state == "FAILURE" and CELERY < (5, 7):
        # Such a message has no outcome there.
        row = replace(row, state="PENDING", events=("task-conflicted", "task-rejected"))
    before = observer.counts()

    def increased() -> set[str]:
        counts = observer.counts().items()
        return {name for (task, name), n in counts if n > before.get((task, name), 0)}

    scenario = row.scenario(Scene(shop, store, order))
    result = next(scenario)
    task_id = result.id
    eventually(
        lambda: (
            all(
                any(matches(text_of(line), line, expected) for line in observer.lines(task_id))
                for expected in row.lines
            )
            and {*row.events} <= observer.events(task_id)
            and {*row.signals} <= observer.signals(task_id)
            and (not row.sentry or bool(row.first) or observer.sentry(task_id))
            and row.state == result.state
            and {*row.counted} <= increased()
        ),
        f"{row.what}: {observer.lines(task_id)} {observer.events(task_id)}",
    )
    lines, celerys_lines = observer.lines(task_id), observer.celerys_lines(task_id)
    counted = increased()
    state = result.state
    print(f"{row.what}: {state}")
    for line in (*lines, *celerys_lines):
        print("   ", line["levelname"], line["message"].splitlines()[0])
    print("    signals", *sorted(observer.signals(task_id)))
    print("    events", *sorted(observer.events(task_id)))
    print("    counted", *sorted(counted))
    print("    Sentry", *observer.sentry(task_id))

    for line in lines:
        candidates = (*row.lines, *row.first)
        assert any(matches(text_of(line), line, candidate) for candidate in candidates), line
        assert line.keys() >= FIELDS
        assert "exc_info" not in line
        assert line["idempotency_decision"] in (None, *row.counted)
        assert bool(line["idempotency_token"]) == bool(line["idempotency_attempt"])
    assert observer.signals(task_id) == {*row.signals}
    assert observer.events(task_id) - BEFORE == {*row.events}
    assert {*row.counted} <= counted <= {*row.counted} | PREPARATION
    assert state == row.state
    if row.sentry or not row.first:
        expected_events = {row.sentry} - {""}
        if row.first:
            expected_events |= {LINE} & {*observer.sentry(task_id)}
        assert {*observer.sentry(task_id)} == expected_events
        assert len(observer.sentry(task_id)) == len(expected_events), "one event for each"
    if row.celerys_line:
        (line,) = celerys_lines
        assert line["levelname"] == row.celerys_line[0]
        assert row.celerys_line[1] in line["message"]
        assert ("exc_info" in line) == bool(row.sentry), "with a traceback"
        if "refused" in row.signals and row.sentry != "KeyRuleError":
            assert line.keys() >= FIELDS
            assert line["idempotency_key"]
        if row.sentry == "KeyRuleError":
            assert "LookupError: no such order" in line["exc_info"], "and with that of its cause"
    elif "task-succeeded" not in row.events:
        assert celerys_lines == [], "Celery's line would say that the message is ignored"
    next(scenario, None)


def test_the_guide_has_these_rows() -> None:
    table = GUIDE.read_text("utf-8").partition("## What is reported")[2]
    rows = [line for line in table.splitlines() if line.startswith("|")][2 : 2 + len(ROWS)]

    assert rows == [row.markdown for row in ROWS]
