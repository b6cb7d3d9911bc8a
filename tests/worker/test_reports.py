"""What an operator gets of each thing that happens to a call: docs/reference/reports.md.

Each row happens to a real worker, whose log is JSON, whose Sentry events are captured, and whose
events and metrics are read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

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
from celery_idempotent.core.store import commands
from tests.flow.deliveries import begin_elsewhere
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON, eventually
from tests.worker.harness import Monitor, Shop
from tests.worker.tasks import (
    charge,
    final,
    flaky,
    forgetful,
    ignoring,
    misruled,
    pack,
    raising,
    rejecting,
    short_lease,
    strict,
    thrifty,
    unguarded,
)

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


INFO, WARNING, ERROR, CRITICAL = "INFO", "WARNING", "ERROR", "CRITICAL"
#: What Sentry gets of a line at ERROR or above; of an error, its type.
LINE = "the line"

Scenario = Callable[["Scene"], Iterator[AsyncResult]]


@dataclass(frozen=True)
class Row:
    """What happens, and what is reported of it."""

    what: str
    scenario: Scenario
    #: Level and text of the package's lines; … stands for any text.
    lines: tuple[tuple[str, str], ...]
    signals: tuple[str, ...]
    #: Besides Celery's own; its last one is compared as well.
    events: tuple[str, ...]
    counted: tuple[str, ...]
    #: In the result backend, once all of this was reported.
    state: str
    sentry: str = ""
    #: Lines of the first call of an outage in a process.
    first: tuple[tuple[str, str], ...] = ()

    @property
    def celerys_line(self) -> tuple[str, str] | None:
        """Level and text of the line with which Celery logs the error of the task."""
        if "task-failed" not in self.events or "task-rejected" in self.events:
            return None
        if self.sentry:
            return ERROR, f"raised unexpected: {self.sentry}"
        error = "ConflictError" if "conflict" in self.counted else "ResultDiscardedError"
        return INFO, f"raised expected: {error}"

    @property
    def markdown(self) -> str:
        """The row of the table in the guide."""
        lines = [f"{level} `{text}`, once in an outage" for level, text in self.first]
        lines += [f"{level} `{text}`" for level, text in self.lines]
        if self.celerys_line:
            lines.append("Celery's {} `{}`".format(*self.celerys_line))
        cells = (
            self.what,
            "<br>".join(lines),
            _code(self.signals),
            _code(self.events),
            _code(self.counted),
            f"`{self.state}`",
            f"`{self.sentry}`" if self.sentry and self.sentry != LINE else self.sentry,
        )
        return " ".join(f"| {' | '.join(cells)} |".split())


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class Scene:
    """The shop, and one key in it."""

    def __init__(self, shop: Shop, store: RedisServer, order: str) -> None:
        self.shop = shop
        self.store = store
        self.order = order

    def hold(self, task: Any) -> tuple[AsyncResult, int]:
        """Starts an execution that runs until the order is released; returns its process id."""
        self.shop.ledger.hold(self.order)
        result = task.delay(self.order)
        return result, self.shop.ledger.wait_for_run(self.order).pid

    def die_elsewhere(self, task: Any, *args: Any) -> None:
        """Ends the lease of the execution that holds the key."""
        record = task.idempotency_record(*args)
        key = task.idempotency_key_of(*args)
        task.idempotency_configuration.execute(
            commands.abandon(key, record.task_id, record.worker, grace_ms=0, reason="")
        )

    def restore_store(self) -> None:
        """Starts the store again; returns when the outage has ended for each process."""
        self.store.restart()
        self.shop.workers[0].children_run(pack, self.shop.ledger)


def call(task: Any, *, times: int = 1) -> Scenario:
    """Calls `task` so many times, one after the other; the row is about the last call."""

    def scenario(scene: Scene) -> Iterator[AsyncResult]:
        for _ in range(times - 1):
            task.delay(scene.order).get(timeout=SOON, propagate=False)
        yield task.delay(scene.order)

    return scenario


def conflict(task: Any) -> Scenario:
    def scenario(scene: Scene) -> Iterator[AsyncResult]:
        first, _ = scene.hold(task)
        duplicate = task.delay(scene.order)
        yield duplicate
        scene.shop.ledger.release(scene.order)
        first.get(timeout=SOON)
        if task.idempotency_on_conflict in (None, "retry", "wait"):
            duplicate.get(timeout=SOON)  # its replay is not to be counted for another row

    return scenario


def take_over(scene: Scene) -> Iterator[AsyncResult]:
    result, pid = scene.hold(pack)
    os.kill(pid, signal.SIGKILL)
    scene.shop.ledger.wait_for_run(scene.order, 2)
    scene.shop.ledger.release(scene.order)
    yield result


def key_rule(scene: Scene) -> Iterator[AsyncResult]:
    yield misruled.delay("raises", scene.order)


def reuse(scene: Scene) -> Iterator[AsyncResult]:
    charge.delay(scene.order, 1).get(timeout=SOON)
    yield charge.delay(scene.order, 2)


def poison(scene: Scene) -> Iterator[AsyncResult]:
    for _ in range(5):
        begin_elsewhere(pack, scene.order)
        scene.die_elsewhere(pack, scene.order)
    yield pack.delay(scene.order)


def damage(scene: Scene) -> Iterator[AsyncResult]:
    scene.store.client().set(f"idem:{pack.idempotency_key_of(scene.order)}", b"damaged")
    yield pack.delay(scene.order)


def lose_lease(scene: Scene) -> Iterator[AsyncResult]:
    result, _ = scene.hold(short_lease)
    scene.die_elsewhere(short_lease, scene.order)
    begin_elsewhere(short_lease, scene.order)
    yield result
    short_lease.idempotency_forget(scene.order, force=True)
    scene.shop.ledger.release(scene.order)
    result.get(timeout=SOON)


def lose_store(scene: Scene) -> Iterator[AsyncResult]:
    result, _ = scene.hold(short_lease)
    scene.store.kill()
    scene.shop.ledger.release(scene.order)
    yield result
    scene.restore_store()


def call_without_store(task: Any) -> Scenario:
    def scenario(scene: Scene) -> Iterator[AsyncResult]:
        scene.store.kill()
        result = task.delay(scene.order)
        yield result
        scene.restore_store()
        if task.idempotency_on_store_error in (None, "retry"):
            result.get(timeout=SOON)  # its next attempts are not to be counted for another row

    return scenario


HOLDER = "the key is held by task … on …"
OUTAGE = (ERROR, "cannot begin: …")

ROWS = (
    Row(
        "a call runs", call(pack),
        (),
        ("begun", "completed"), ("task-succeeded",), ("run", "completed"), "SUCCESS",
    ),
    Row(
        "its duplicate, afterwards", call(pack, times=2),
        ((INFO, "gets the outcome of task …"),),
        ("replayed",), ("task-replayed", "task-succeeded"), ("replay",), "SUCCESS",
    ),
    Row(
        "its duplicate, meanwhile: `retry`, `wait`, or a copy of its message", conflict(pack),
        ((INFO, f"is put back for … s unless woken: {HOLDER}"),),
        ("conflicted",), ("task-conflicted",), ("conflict",), "PENDING",
    ),
    Row(
        "its duplicate, meanwhile: `raise`", conflict(raising),
        ((INFO, f"raises ConflictError: {HOLDER}"),),
        ("conflicted",), ("task-conflicted", "task-failed"), ("conflict",), "FAILURE",
    ),
    Row(
        "its duplicate, meanwhile: `ignore`", conflict(ignoring),
        ((INFO, f"is ignored as a duplicate: {HOLDER}"),),
        ("conflicted",), ("task-conflicted",), ("conflict",), "PENDING",
    ),
    Row(
        "its duplicate, meanwhile: `reject`", conflict(rejecting),
        ((INFO, f"is rejected as a duplicate: {HOLDER}"),),
        ("conflicted",), ("task-conflicted", "task-failed", "task-rejected"),
        ("conflict",), "FAILURE",
    ),
    Row(
        "a worker process is killed, and its task runs again", take_over,
        (
            (INFO, "is ended (process_lost); its key is free in 0.0 s"),
            (INFO, "takes over from an execution that died"),
        ),
        ("begun", "taken_over", "completed"),
        ("task-rejected", "task-taken-over", "task-succeeded"),
        ("run", "takeover", "completed"), "SUCCESS",
    ),
    Row(
        "the task raises", call(flaky),
        ((INFO, "ran and raised …; its key is free"),),
        ("begun", "released"), ("task-failed",), ("run", "released"), "FAILURE",
        "OutOfStockError",
    ),
    Row(
        "the task raises one of `idempotency_replay_errors`", call(final),
        ((INFO, "ran and raised …; its duplicates will get this error"),),
        ("begun", "failed"), ("task-failed",), ("run", "failed"), "FAILURE",
        "OutOfStockError",
    ),
    Row(
        "its duplicate, if the error is stored", call(final, times=2),
        ((INFO, "gets the outcome of task …"),),
        ("replayed",), ("task-replayed", "task-failed"), ("replay",), "FAILURE",
        "OutOfStockError",
    ),
    Row(
        "no key can be derived", key_rule,
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_key_rule"), "FAILURE",
        "KeyRuleError",
    ),
    Row(
        "the key was used with other arguments", reuse,
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_reused"), "FAILURE",
        "KeyReusedError",
    ),
    Row(
        "the task has killed its worker too often", poison,
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_poisoned"), "FAILURE",
        "PoisonedTaskError",
    ),
    Row(
        "the record is damaged", damage,
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_corrupt"), "FAILURE",
        "CorruptRecordError",
    ),
    Row(
        "a result cannot be stored", call(thrifty),
        ((ERROR, "ran; its outcome is not stored, and its duplicates will get …: …"),),
        ("begun", "completed", "not_stored"), ("task-succeeded",),
        ("run", "completed", "not_stored"), "SUCCESS", LINE,
    ),
    Row(
        "its duplicate, if the result is not stored", call(thrifty, times=2),
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_not_stored"), "FAILURE",
        "ResultNotStoredError",
    ),
    Row(
        "its duplicate, if results are not kept (`idempotency_store_result=False`)",
        call(forgetful, times=2),
        ((INFO, "gets the outcome of task …"),),
        ("replayed",), ("task-replayed", "task-failed"), ("replay",), "FAILURE",
    ),
    Row(
        "a lease is lost, and another execution has begun", lose_lease,
        ((WARNING, "has lost its lease; its outcome will be refused"),),
        ("begun", "lease_lost"), (), ("run", "lease_lost"), "PENDING",
    ),
    Row(
        "Redis is unavailable when a task has ended", lose_store,
        ((CRITICAL, "ran; its outcome is not stored, so a duplicate may run again: …"),),
        ("begun", "outcome_unsaved"), ("task-succeeded",), ("run", "outcome_unsaved"), "SUCCESS",
        LINE,
    ),
    Row(
        "Redis is unavailable before a call: `retry`", call_without_store(pack),
        (),
        ("store_unavailable",), (), ("store_unavailable",), "PENDING", LINE, first=(OUTAGE,),
    ),
    Row(
        "Redis is unavailable before a call: `raise`", call_without_store(strict),
        (),
        ("store_unavailable", "refused"), ("task-refused", "task-failed"),
        ("refused", "refused_store_unavailable"), "FAILURE", "StoreUnavailableError",
        first=(OUTAGE,),
    ),
    Row(
        "Redis is unavailable before a call: `run`", call_without_store(unguarded),
        ((WARNING, "runs without protection: …"),),
        ("store_unavailable",), ("task-succeeded",), ("unprotected",), "SUCCESS", first=(OUTAGE,),
    ),
)  # fmt: skip


pytestmark = [pytest.mark.worker, pytest.mark.slow]

GUIDE = Path(__file__).parents[2] / "docs/reference/reports.md"
CELERY = tuple(map(int, celery.__version__.split(".")[:2]))


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
        options = ("--task-events", "--include", __name__)
        shop.start_worker(*options, concurrency=2, **{REPORTS_VARIABLE: str(reports)})
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
        records = _read(self._reports / _LOG)
        return [
            r
            for r in records
            if r["name"].startswith("celery_idempotent") and r.get("idempotency_task_id") == task_id
        ]

    def celerys_lines(self, task_id: str) -> list[dict[str, Any]]:
        """The lines of Celery's tracer."""
        records = _read(self._reports / _LOG)
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
            for event in _read(self._reports / _EVENTS)
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
    table = GUIDE.read_text("utf-8")
    rows = [line for line in table.splitlines() if line.startswith("|")][2 : 2 + len(ROWS)]

    assert rows == [row.markdown for row in ROWS]
