"""What an operator gets of each thing that happens to a call: docs/reference/reports.md.

Each row happens to a real worker, whose log is JSON, whose Sentry events are captured, and whose
events and metrics are read.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import celery
import pytest

pytest.importorskip("sentry_sdk")
pytest.importorskip("pythonjsonlogger")

import sentry_sdk
from celery.result import AsyncResult
from celery.signals import after_setup_logger
from pythonjsonlogger.json import JsonFormatter
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

from celery_idempotent.core.events.table import REFUSED_FOR
from tests.flow.deliveries import begin_elsewhere
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker import tasks
from tests.worker.harness import Monitor, OpenShop, Shop, end_lease, scrape
from tests.worker.tasks import charge, misruled, pack, short_lease

#: The directory to which a worker reports; it imports this module.
REPORTS_VARIABLE = "SHOP_REPORTS"
_LOG, _EVENTS = "log.jsonl", "sentry.jsonl"


def install(directory: Path) -> None:
    """Begins to report, before the worker configures its logs."""

    class FileTransport(Transport):
        """Writes events to a file instead of sending them."""

        def capture_envelope(self, envelope: Any) -> None:
            if (event := envelope.get_event()) is not None:
                with (directory / _EVENTS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event, default=str) + "\n")

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=FileTransport, integrations=[CeleryIntegration()]
    )

    @after_setup_logger.connect(weak=False)
    def add_handler(logger: logging.Logger, **_: Any) -> None:
        handler = logging.FileHandler(directory / _LOG, encoding="utf-8")
        handler.setFormatter(JsonFormatter("%(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)


if REPORTS_VARIABLE in os.environ:
    install(Path(os.environ[REPORTS_VARIABLE]))


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    # The last line may be incomplete.
    lines = file.read_text("utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


GUIDE = Path(__file__).parents[2] / "docs/reference/reports.md"
#: What Sentry gets of a line at ERROR or above; of an error, its type.
LINE = "the line"


@dataclass(frozen=True)
class Row:
    """A row of the guide."""

    #: Level and text of the package's lines; … stands for any text.
    lines: list[tuple[str, str]]
    #: Lines of the first call of an outage in a process.
    first: list[tuple[str, str]]
    #: The line with which Celery logs the error of the task, if it does.
    celerys_lines: list[tuple[str, str]]
    signals: set[str]
    #: Besides Celery's own; its last one is compared as well.
    events: set[str]
    counted: set[str]
    #: In the result backend, once all of this was reported.
    state: str
    sentry: str

    @staticmethod
    def read(log: str, signals: str, events: str, counted: str, state: str, sentry: str) -> Row:
        lines: dict[str, list[Any]] = {"": [], ", once in an outage": [], "Celery's ": []}
        for line in filter(None, log.split("<br>")):
            found = re.fullmatch("(Celery's )?([A-Z]+) `(.+)`(, once in an outage)?", line)
            assert found, line
            lines[found[1] or found[4] or ""].append((found[2], found[3]))
        names = (set(re.findall("`(.+?)`", cell)) for cell in (signals, events, counted))
        return Row(*lines.values(), *names, state.strip("`"), sentry.strip("`"))


ROWS = {}
for _line in GUIDE.read_text("utf-8").splitlines():
    if _line.startswith("| ") and not _line.startswith("| what happens"):
        _what, *_cells = (cell.strip() for cell in _line.removesuffix("|")[1:].split("|"))
        ROWS[_what] = Row.read(*_cells)

Scenario = Callable[[Shop, RedisServer, str], Iterator[AsyncResult]]


def restore(store: RedisServer, shop: Shop) -> None:
    """Starts the store again; returns when the outage has ended for each process."""
    store.restart()
    shop.workers[0].children_run(pack, shop.ledger)


def call(task: Any, *, times: int = 1) -> Scenario:
    """Calls `task` so many times, one after the other; the row is about the last call."""

    def scenario(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
        for _ in range(times - 1):
            task.delay(order).get(timeout=SOON, propagate=False)
        yield task.delay(order)

    return scenario


def conflict(task: Any) -> Scenario:
    def scenario(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
        first = shop.ledger.start(task, order)
        duplicate = task.delay(order)
        yield duplicate
        shop.ledger.release(order)
        first.get(timeout=SOON)
        if task.idempotency_on_conflict in (None, "retry", "wait"):
            duplicate.get(timeout=SOON)  # its replay is not to be counted for another row

    return scenario


def take_over(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    result = shop.ledger.start(pack, order)
    shop.ledger.kill(order)
    shop.ledger.wait_for_run(order, 2)
    shop.ledger.release(order)
    yield result


def key_rule(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    yield misruled.delay("raises", order)


def reuse(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    charge.delay(order, 1).get(timeout=SOON)
    yield charge.delay(order, 2)


def poison(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    for _ in range(5):
        begin_elsewhere(pack, order)
        end_lease(pack, order)
    yield pack.delay(order)


def damage(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    store.client().set(f"idem:{pack.idempotency_key_of(order)}", b"damaged")
    yield pack.delay(order)


def lose_lease(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    result = shop.ledger.start(short_lease, order)
    end_lease(short_lease, order)
    begin_elsewhere(short_lease, order)
    yield result
    short_lease.idempotency_forget(order, force=True)
    shop.ledger.release(order)
    result.get(timeout=SOON)


def lose_store(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
    result = shop.ledger.start(short_lease, order)
    store.kill()
    shop.ledger.release(order)
    yield result
    restore(store, shop)


def call_without_store(task: Any) -> Scenario:
    def scenario(shop: Shop, store: RedisServer, order: str) -> Iterator[AsyncResult]:
        store.kill()
        result = task.delay(order)
        yield result
        restore(store, shop)
        if task.idempotency_on_store_error in (None, "retry"):
            result.get(timeout=SOON)  # its next attempts are not to be counted for another row

    return scenario


SCENARIOS = {
    "a call runs": call(pack),
    "its duplicate, afterwards": call(pack, times=2),
    "its duplicate, meanwhile: `retry`, `wait`, or a copy of its message": conflict(pack),
    "its duplicate, meanwhile: `raise`": conflict(tasks.raising),
    "its duplicate, meanwhile: `ignore`": conflict(tasks.ignoring),
    "its duplicate, meanwhile: `reject`": conflict(tasks.rejecting),
    "a worker process is killed, and its task runs again": take_over,
    "the task raises": call(tasks.flaky),
    "the task raises one of `idempotency_replay_errors`": call(tasks.final),
    "its duplicate, if the error is stored": call(tasks.final, times=2),
    "no key can be derived": key_rule,
    "the key was used with other arguments": reuse,
    "the task has killed its worker too often": poison,
    "the record is damaged": damage,
    "a result cannot be stored": call(tasks.thrifty),
    "its duplicate, if the result is not stored": call(tasks.thrifty, times=2),
    "its duplicate, if results are not kept (`idempotency_store_result=False`)": call(
        tasks.forgetful, times=2
    ),
    "a lease is lost, and another execution has begun": lose_lease,
    "Redis is unavailable when a task has ended": lose_store,
    "Redis is unavailable before a call: `retry`": call_without_store(pack),
    "Redis is unavailable before a call: `raise`": call_without_store(tasks.strict),
    "Redis is unavailable before a call: `run`": call_without_store(tasks.unguarded),
}


pytestmark = pytest.mark.slow

CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def shared_shop(
    open_shop: OpenShop, store: RedisServer, reports: Path, port: int
) -> Iterator[Shop]:
    address = f"127.0.0.1:{port}"
    with open_shop(idempotency_redis_url=store.url, idempotency_metrics=address) as shop:
        options = ("--task-events", "--include", __name__)
        shop.start_worker(*options, concurrency=2, **{REPORTS_VARIABLE: str(reports)})
        yield shop


class Observer:
    """Reads what was reported of one task id."""

    def __init__(self, shop: Shop, monitor: Monitor, reports: Path, port: int) -> None:
        self._shop, self._monitor, self._reports, self._port = shop, monitor, reports, port

    def lines(self, task_id: str) -> list[dict[str, Any]]:
        """The package's lines."""
        lines = _read(self._reports / _LOG)
        ours = (line for line in lines if line["name"].startswith("celery_idempotent"))
        return [line for line in ours if line.get("idempotency_task_id") == task_id]

    def celerys_lines(self, task_id: str) -> list[dict[str, Any]]:
        """The lines of Celery's tracer."""
        lines = _read(self._reports / _LOG)
        traces = (line for line in lines if line["name"] == "celery.app.trace")
        return [line for line in traces if line.get("data", {}).get("id") == task_id]

    def signals(self, task_id: str) -> set[str]:
        return {signal.name for signal in self._shop.ledger.signals(task_id)}

    def events(self, task_id: str) -> set[str]:
        return {e["type"] for e in self._monitor.received if e.get("uuid") == task_id}

    def sentry(self, task_id: str) -> list[str]:
        """The types of the errors, or the levels of the lines."""
        return [
            event["exception"]["values"][-1]["type"] if "exception" in event else LINE
            for event in _read(self._reports / _EVENTS)
            if event.get("tags", {}).get("celery_task_id") == task_id
        ]

    def counts(self) -> dict[tuple[str, str], float]:
        """The counters by task and decision, outcome, or reason of refusals."""
        found = {}
        for series, value in scrape(self._port).items():
            if parts := re.fullmatch(r"celery_idempotent_(\w+)_total\{(.*)\}", series):
                named = dict(re.findall(r'(\w+)="(.*?)"', parts[2]))
                task = named.pop("task")
                found[task, REFUSED_FOR * (parts[1] == "refused") + "".join(named.values())] = value
        return found


@pytest.fixture
def observer(shared_shop: Shop, monitor: Monitor, reports: Path, port: int) -> Observer:
    return Observer(shared_shop, monitor, reports, port)


#: Sent by Celery before a task ends.
BEFORE = {"task-received", "task-started"}
#: Counted for what precedes a row.
PREPARATION = {"run", "completed", "failed", "not_stored"}
FIELDS = {f"idempotency_{name}" for name in ("key", "task_id", "decision", "token", "attempt")}


def matches(line: dict[str, Any], level_and_text: tuple[str, str]) -> bool:
    """Returns whether the line has this text after the call that it begins with."""
    level, template = level_and_text
    prefix = r"shop\.[\w:~-]+: task [\w-]+(?: \(attempt \d+\))? "
    text, found = re.subn(rf"\A{prefix}", "", line["message"])
    assert found, line
    pattern = ".+".join(map(re.escape, template.split("…")))
    return line["levelname"] == level and re.fullmatch(pattern, text, re.DOTALL) is not None


@pytest.mark.parametrize("what", ROWS)
def test_row(what: str, shop: Shop, store: RedisServer, observer: Observer, order: str) -> None:
    row = ROWS[what]
    if "task-rejected" in row.events and row.state == "FAILURE" and CELERY < (5, 7):
        # Such a message has no outcome there.
        row = replace(row, state="PENDING", events={"task-conflicted", "task-rejected"})
    before = observer.counts()

    def increased() -> set[str]:
        counts = observer.counts().items()
        return {name for (task, name), n in counts if n > before.get((task, name), 0)}

    scenario = SCENARIOS[what](shop, store, order)
    result = next(scenario)
    task_id = result.id
    eventually(
        lambda: (
            all(
                any(matches(line, expected) for line in observer.lines(task_id))
                for expected in row.lines
            )
            and row.events <= observer.events(task_id)
            and row.signals <= observer.signals(task_id)
            and (not row.sentry or bool(row.first) or observer.sentry(task_id))
            and row.state == result.state
            and row.counted <= increased()
        ),
        f"{what}: {observer.lines(task_id)} {observer.events(task_id)}",
    )
    lines, celerys_lines = observer.lines(task_id), observer.celerys_lines(task_id)
    counted = increased()
    state = result.state

    for line in lines:
        assert any(matches(line, candidate) for candidate in (*row.lines, *row.first)), line
        assert line.keys() >= FIELDS
        assert "exc_info" not in line
        assert line["idempotency_decision"] in (None, *row.counted)
        assert bool(line["idempotency_token"]) == bool(line["idempotency_attempt"])
    assert observer.signals(task_id) == row.signals
    assert observer.events(task_id) - BEFORE == row.events
    assert row.counted <= counted <= row.counted | PREPARATION
    assert state == row.state
    if row.sentry or not row.first:
        expected_events = {row.sentry} - {""}
        if row.first:
            expected_events |= {LINE} & {*observer.sentry(task_id)}
        assert {*observer.sentry(task_id)} == expected_events
        assert len(observer.sentry(task_id)) == len(expected_events), "one event for each"
    if "task-succeeded" not in row.events:
        # Celery's line of other calls would say that the message is ignored.
        assert len(celerys_lines) == len(row.celerys_lines)
    for level, text in row.celerys_lines:
        (line,) = celerys_lines
        assert line["levelname"] == level
        assert text in line["message"]
        assert ("exc_info" in line) == bool(row.sentry), "with a traceback"
        if "refused" in row.signals and row.sentry != "KeyRuleError":
            assert line.keys() >= FIELDS
            assert line["idempotency_key"]
        if row.sentry == "KeyRuleError":
            assert "LookupError: no such order" in line["exc_info"], "and with that of its cause"
    next(scenario, None)


def test_the_guide_has_a_row_for_each_scenario() -> None:
    assert [*ROWS] == [*SCENARIOS]
