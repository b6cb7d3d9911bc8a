"""What can happen to a call, and what is reported of it: the rows of `test_reports`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from celery.result import AsyncResult

from celery_idempotent.store import commands
from tests.flow.deliveries import begin_elsewhere
from tests.servers.redis_server import RedisServer
from tests.waiting import SOON
from tests.worker.failing_tasks import final, flaky
from tests.worker.harness import Shop
from tests.worker.tasks import (
    charge,
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
            commands.abandon(key, record.task_id, record.worker, root=bytes(8), grace_ms=0)
        )

    def restore_store(self) -> None:
        """Starts the store again; returns when the outage has ended for each process."""
        self.store.restart()
        self.shop.workers[0].children_run(pack, self.shop.ledger)


def run(scene: Scene) -> Iterator[AsyncResult]:
    yield pack.delay(scene.order)


def replay(scene: Scene) -> Iterator[AsyncResult]:
    pack.delay(scene.order).get(timeout=SOON)
    yield pack.delay(scene.order)


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


def release(scene: Scene) -> Iterator[AsyncResult]:
    yield flaky.delay(scene.order)


def fail(scene: Scene) -> Iterator[AsyncResult]:
    yield final.delay(scene.order)


def replay_error(scene: Scene) -> Iterator[AsyncResult]:
    final.delay(scene.order).get(timeout=SOON, propagate=False)
    yield final.delay(scene.order)


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


def lose_value(scene: Scene) -> Iterator[AsyncResult]:
    yield thrifty.delay(scene.order)


def replay_lost_value(scene: Scene) -> Iterator[AsyncResult]:
    thrifty.delay(scene.order).get(timeout=SOON)
    yield thrifty.delay(scene.order)


def replay_fact(scene: Scene) -> Iterator[AsyncResult]:
    forgetful.delay(scene.order).get(timeout=SOON)
    yield forgetful.delay(scene.order)


def lose_lease(scene: Scene) -> Iterator[AsyncResult]:
    result, _ = scene.hold(short_lease)
    scene.die_elsewhere(short_lease, scene.order)
    begin_elsewhere(short_lease, scene.order)
    yield result
    short_lease.idempotency_forget(scene.order)
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
        "a call runs", run,
        (),
        ("begun", "completed"), ("task-succeeded",), ("run", "completed"), "SUCCESS",
    ),
    Row(
        "its duplicate, afterwards", replay,
        ((INFO, "gets the outcome of task …"),),
        ("replayed",), ("task-replayed", "task-succeeded"), ("replay",), "SUCCESS",
    ),
    Row(
        "its duplicate, meanwhile: `retry`, `wait`, or a copy of its message", conflict(pack),
        ((INFO, f"is requeued for … s: {HOLDER}"),),
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
        "the task raises", release,
        ((INFO, "ran and raised …; its key is free"),),
        ("begun", "released"), ("task-failed",), ("run", "released"), "FAILURE",
        "OutOfStockError",
    ),
    Row(
        "the task raises one of `idempotency_replay_errors`", fail,
        ((INFO, "ran and raised …; its duplicates will get this error"),),
        ("begun", "failed"), ("task-failed",), ("run", "failed"), "FAILURE",
        "OutOfStockError",
    ),
    Row(
        "its duplicate, if the error is stored", replay_error,
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
        "a result cannot be stored", lose_value,
        (
            (
                ERROR,
                "ran; its outcome is not stored, and its duplicates will get …: …",
            ),
        ),
        ("begun", "completed", "not_stored"), ("task-succeeded",),
        ("run", "completed", "not_stored"), "SUCCESS", LINE,
    ),
    Row(
        "its duplicate, if the result is not stored", replay_lost_value,
        (),
        ("refused",), ("task-refused", "task-failed"), ("refused", "refused_not_stored"), "FAILURE",
        "ResultNotStoredError",
    ),
    Row(
        "its duplicate, if results are not kept (`idempotency_store_result=False`)", replay_fact,
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
