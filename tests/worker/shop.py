"""The shop whose workers are tested: its Celery app and its tasks.

A worker loads this module and finds the app's settings in its environment. A test imports the same
tasks and calls them; they then belong to the app of the :class:`~tests.worker.harness.Shop` that
the test has opened.

Tasks are small and say in the ledger that they ran. Most share one body, :func:`handle`, and differ
in the option that they are named after.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery, chain, group, shared_task
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_failure, task_success, worker_init

from celery_idempotent import TASK_ID, IdempotentTask, LeaseLostError, signals
from celery_idempotent.task import republish
from tests.worker.ledger import Ledger
from tests.worker.mortal import die_with_parent

SETTINGS_VARIABLE = "SHOP_SETTINGS"
KEYRING_VARIABLE = "SHOP_KEYRING"

SIGNALS = (
    "begun",
    "taken_over",
    "completed",
    "failed",
    "released",
    "replayed",
    "conflicted",
    "lease_lost",
    "outcome_unsaved",
    "store_unavailable",
)


def make_app(settings: Mapping[str, Any]) -> Celery:
    """The shop's app; its tasks are shared ones, so any number of apps have them."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    republish.CONFIRM_TIMEOUT = settings.get("shop_confirm_timeout", republish.CONFIRM_TIMEOUT)
    return app


app = (
    make_app(json.loads(os.environ[SETTINGS_VARIABLE])) if SETTINGS_VARIABLE in os.environ else None
)


def handle(self: Any, order: str, amount: int = 1) -> dict[str, Any]:
    """Handle an order; the receipt tells one run from another."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return {"receipt": uuid4().hex, "amount": amount}


def task_of(body: Any, name: str, **options: Any) -> Any:
    """A task of its own with the body of another."""
    return shared_task(body, bind=True, base=IdempotentTask, name=f"shop.{name}", **options)


pack = task_of(handle, "pack")
charge = task_of(handle, "charge", idempotency_key="order:{order}")
tick = task_of(handle, "tick", idempotency_key=TASK_ID)
open_door = task_of(handle, "open_door", idempotency_enabled=False)

waiting = task_of(handle, "waiting", idempotency_on_conflict="wait")
impatient = task_of(
    handle, "impatient", idempotency_on_conflict="wait", idempotency_wait_timeout=0.3
)
raising = task_of(handle, "raising", idempotency_on_conflict="raise")
ignoring = task_of(handle, "ignoring", idempotency_on_conflict="ignore")
rejecting = task_of(handle, "rejecting", idempotency_on_conflict="reject")

short_lease = task_of(handle, "short_lease", idempotency_lease=2.0)
aborting = task_of(handle, "aborting", idempotency_lease=2.0, idempotency_on_lease_lost="abort")
reserved = task_of(handle, "reserved", idempotency_dedupe_publish=True)
silent = task_of(handle, "silent", ignore_result=True)
forgetful = task_of(handle, "forgetful", idempotency_store_result=False)
thrifty = task_of(handle, "thrifty", idempotency_max_result_size=10)

unguarded = task_of(handle, "unguarded", idempotency_on_store_error="run")
strict = task_of(handle, "strict", idempotency_on_store_error="raise")


class UnsendableTask(IdempotentTask):
    """A task whose messages the broker hands out, and takes no others of."""

    abstract = True

    def signature_from_request(self, *args: Any, **options: Any) -> Any:
        """Fail at once, as no broker that is away does."""
        raise OSError("the broker takes no messages")


unsendable = shared_task(handle, bind=True, base=UnsendableTask, name="shop.unsendable")


class UnretryableTask(IdempotentTask):
    """A task whose retries the broker does not take."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Fail as a connection that is reset does."""
        if options.get("retries"):
            raise ConnectionResetError("the broker takes no retries")
        return super().apply_async(*args, **options)


@shared_task(bind=True, base=UnretryableTask, name="shop.try_in_vain")
def try_in_vain(self: Any, order: str) -> str:
    """Retry the first time."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            raise self.retry(countdown=0)
        return "back"


@shared_task(bind=True, base=IdempotentTask, name="shop.give", idempotency_key="{order}")
def give(self: Any, order: str, value: Any) -> Any:
    """Return `value`."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return value


def read_keyring() -> list[str]:
    """The keys of now, as a vault would give them."""
    return Path(os.environ[KEYRING_VARIABLE]).read_text().split()


def rule_with(fault: str, order: str) -> Any:
    """A key rule of somebody who has not thought of everything."""
    if fault == "raises":
        raise LookupError(f"no such order: {order}")
    return {
        "none": None,
        "empty": "",
        "nan": float("nan"),
        "object": object(),
        "long": order * 300_000,
        "control": f"{order}\0\n\x1b[31m{{}}",
    }[fault]


def misrule(self: Any, fault: str, order: str) -> str:
    """Run, if there is a key."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return uuid4().hex


misruled = task_of(misrule, "misruled", idempotency_key=rule_with)
misruled_early = task_of(
    misrule, "misruled_early", idempotency_key=rule_with, idempotency_dedupe_publish=True
)


@shared_task(bind=True, base=IdempotentTask, name="shop.unserialisable")
def unserialisable(self: Any, order: str) -> object:
    """Return what no serializer can write."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return object()


class OutOfStockError(Exception):
    """An error with arguments of its own."""

    def __init__(self, article: str, left: int) -> None:
        super().__init__(article, left)


def run_out(self: Any, order: str, times: int = 1_000) -> str:
    """Fail the first so many times."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) <= times:
            raise OutOfStockError(order, 3)
        return "found one"


flaky = task_of(run_out, "flaky")
final = task_of(run_out, "final", idempotency_replay_errors=(OutOfStockError,))


#: Seconds: longer than a message stays invisible in `SOON_VISIBLE`, its sweep included.
LATE = 5.0


class UnwritableError(Exception):
    """An error that neither pickle nor JSON can write."""

    def __init__(self) -> None:
        super().__init__(lambda: None)


def run_late(self: Any, order: str, writable: bool = True) -> None:
    """Fail after so long that the broker has given up on the message."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        time.sleep(LATE)
        if self.soft_time_limit or self.time_limit:
            time.sleep(LATE)
        raise OutOfStockError(order, 3) if writable else UnwritableError


def die_late(self: Any, order: str, writable: bool = True) -> None:
    """Kill the pool child after so long."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        time.sleep(LATE)
        os.kill(os.getpid(), signal.SIGKILL)


die_late_for_good = task_of(die_late, "die_late_for_good", reject_on_worker_lost=False)
fail_late = task_of(run_late, "fail_late")
fail_late_as_expected = task_of(run_late, "fail_late_as_expected", throws=(OutOfStockError,))
fail_late_again = task_of(
    run_late, "fail_late_again", autoretry_for=(OutOfStockError,), max_retries=1,
    default_retry_delay=0,
)  # fmt: skip
fail_late_at_length = task_of(run_late, "fail_late_at_length", idempotency_max_result_size=10)
fail_late_by_the_clock = task_of(run_late, "fail_late_by_the_clock", soft_time_limit=LATE)
fail_late_by_force = task_of(run_late, "fail_late_by_force", time_limit=LATE)


@shared_task(bind=True, base=IdempotentTask, name="shop.poll_late", max_retries=None)
def poll_late(self: Any, order: str, countdown: float, times: int, lost: bool = False) -> str:
    """Retry so often, after so long that the broker has given up on the message."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        ledger.note(order, str(self.request.retries))
        if len(ledger.runs(order)) > times:
            return "done"
        time.sleep(LATE)
        if lost:
            raise Retry(when=countdown)
        raise self.retry(countdown=countdown)


@shared_task(bind=True, base=IdempotentTask, name="shop.try_later")
def try_later(self: Any, order: str, countdown: float) -> str:
    """Retry once, as Celery's own tasks do."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(countdown=countdown)
        return uuid4().hex


@shared_task(bind=True, base=IdempotentTask, name="shop.try_at")
def try_at(self: Any, order: str, eta: str) -> str:
    """Retry once, at a moment that is told as text."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(eta=eta)
        return uuid4().hex


@shared_task(bind=True, base=IdempotentTask, name="shop.change_then_handle")
def change_then_handle(self: Any, order: str, amount: int) -> int:
    """Retry once, with another amount."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(args=(order, amount + 1), countdown=0)
        return amount


@shared_task(
    bind=True, base=IdempotentTask, name="shop.label_then_handle", idempotency_key="{order}"
)
def label_then_handle(self: Any, order: str, amount: int) -> int:
    """Retry once, with another amount and with headers for whoever looks at the message."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        if self.request.retries == 0:
            raise self.retry(args=(order, amount + 1), countdown=0, headers={"label": "again"})
        assert self.request.headers["label"] == "again"
        return amount


@shared_task(bind=True, base=IdempotentTask, name="shop.give_up", max_retries=1)
def give_up(self: Any, order: str, countdown: float = 0) -> None:
    """Retry until that is not allowed any more."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        raise self.retry(countdown=countdown, exc=OutOfStockError(order, 3))


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over")
def hand_over(self: Any, order: str) -> None:
    """Let another task handle the order, under this one's id."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        self.replace(pack.s(f"replacement of {order}"))


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over_badly")
def hand_over_badly(self: Any, order: str) -> str:
    """Let another task handle what no message can carry; the second run knows better."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            self.replace(pack.s(object()))
        return "handled here"


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over_in_vain")
def hand_over_in_vain(self: Any, order: str) -> None:
    """Let a task take this one's place that fails."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        self.replace(flaky.s(f"replacement of {order}"))


@shared_task(bind=True, base=IdempotentTask, name="shop.hand_over_silently")
def hand_over_silently(self: Any, order: str) -> None:
    """Let a task take this one's place whose result nobody will hear of."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        self.replace(silent.s(f"replacement of {order}"))


def go_on(self: Any, order: str, stage: int = 0, stages: int = 2) -> int:
    """Let the task itself take its place, so many times."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) <= stages:
            self.replace(self.si(order, stage and stage + 1))
        return len(ledger.runs(order))


polling = task_of(go_on, "polling")
staged = task_of(go_on, "staged", idempotency_key="{order}")

PARTS = ("charge", "book", "mail")


@shared_task(bind=True, base=IdempotentTask, name="shop.ship")
def ship(self: Any, order: str, after: str = "", way: str = "") -> list[str]:
    """Ship an order in three steps; `after` one of them the first run does not go on."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        first = len(ledger.runs(order)) == 1
        values = []
        for part in PARTS:
            values.append(self.idempotency.step(part, _do_part, ledger, order, part))
            if first and part == after:
                _break_off(self, order, way)
        return values


def _do_part(ledger: Ledger, order: str, part: str) -> str:
    ledger.note(order, part)
    ledger.wait_for_release(f"{part} of {order}")
    return f"{part} {uuid4().hex}"


def _break_off(task: Any, order: str, way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "retry":
        raise task.retry(countdown=0)
    raise OutOfStockError(order, 3)


@shared_task(bind=True, base=IdempotentTask, name="shop.call_itself")
def call_itself(self: Any, order: str, depth: int) -> str:
    """Call the task as a function, while it runs."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        return f"{depth} {call_itself(order, depth - 1)}" if depth else "0"


def leave(self: Any, order: str, way: str) -> str:
    """Leave the first run in an unusual way, and return from the next."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        if len(ledger.runs(order)) == 1:
            raise WAYS_OUT[way]
        return "back"


WAYS_OUT: dict[str, BaseException] = {
    "SystemExit": SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Ignore": Ignore(),
    "Reject": Reject("not this one", requeue=False),
    "requeue": Reject("not now", requeue=True),
}

leaving = task_of(leave, "leaving")
soft_limited = task_of(handle, "soft_limited", soft_time_limit=0.5)
dead_lettered = task_of(run_out, "dead_lettered", acks_on_failure_or_timeout=False)
hard_limited_again = task_of(
    handle, "hard_limited_again", time_limit=1.0, acks_on_failure_or_timeout=False
)
hard_limited = task_of(handle, "hard_limited", time_limit=1.0)


def die(self: Any, order: str) -> None:
    """Kill the pool child that this runs in."""
    with Ledger.of(self.app).run(order, self.request.id, self.idempotency):
        os.kill(os.getpid(), signal.SIGKILL)


poison = task_of(die, "poison", idempotency_max_attempts=2)


@shared_task(bind=True, base=IdempotentTask, name="shop.check_then_handle")
def check_then_handle(self: Any, order: str) -> dict[str, Any]:
    """Ask, once the test lets it go on, whether the lease still holds."""
    ledger = Ledger.of(self.app)
    with ledger.run(order, self.request.id, self.idempotency):
        try:
            self.idempotency.check()
        except LeaseLostError as error:
            ledger.note(order, str(error))
        else:
            ledger.note(order, "the lease holds")
        return {"receipt": uuid4().hex}


@shared_task(bind=True, base=IdempotentTask, name="shop.follow_up")
def follow_up(self: Any, receipt: Any, order: str) -> Any:
    """What comes after an order, with the result of what came before."""
    Ledger.of(self.app).note(order, "followed up")
    return [receipt, order]


@shared_task(bind=True, name="shop.report")
def report(self: Any, receipts: Any, order: str) -> Any:
    """The plain task at the end of a canvas."""
    Ledger.of(self.app).note(order, json.dumps(receipts))
    return receipts


ITEMS = 5


@shared_task(bind=True, base=IdempotentTask, name="shop.fan_out", idempotency_key="{order}")
def fan_out(self: Any, order: str, way: str, item: int | None = None, after: str = "") -> None:
    """Send a child for each of five items, with the headers of this message."""
    ledger = Ledger.of(self.app)
    if item is not None:
        ledger.note(order, str(item))
        return
    with ledger.run(order, self.request.id, self.idempotency):
        if after == "retry" and self.request.retries == 0:
            raise self.retry(countdown=0)
        _send_children(self, order, way)


def _send_children(task: Any, order: str, way: str) -> None:
    headers = task.request.headers
    children = [f"{item} {order}" for item in range(ITEMS)]
    if way == "apply_async":
        for child in children:
            pack.apply_async((child,), headers=headers)
    elif way == "by name":
        for child in children:
            task.app.send_task("shop.pack", (child,), headers=headers)
    elif way == "signature":
        for child in children:
            chain(pack.s(child).set(headers=headers), report.s(child)).delay()
    elif way == "group":
        group(pack.s(child) for child in children).apply_async(headers=headers)
    elif way == "map":
        pack.map(children).apply_async(headers=headers)
    elif way == "plain task":
        for child in children:
            relay.apply_async((child,), headers=headers)
    elif way == "eager":
        for child in children:
            pack.apply((child,), headers=headers).get(disable_sync_subtasks=False)
    elif way == "itself":
        for item in range(ITEMS):
            self = task.app.tasks["shop.fan_out"]
            self.apply_async((children[item], way, item), headers=headers)


@shared_task(bind=True, name="shop.relay")
def relay(self: Any, order: str) -> None:
    """A plain task that passes its headers on."""
    pack.apply_async((order,), headers=self.request.headers)


def _tell(signal: Any, sender: Any, **details: Any) -> None:
    if isinstance(sender, IdempotentTask):  # in a test's process there are other callers, too
        name = signal.name.removeprefix("idempotency_")
        Ledger.of(sender.app).hear(name, sender.name, details)


for _name in SIGNALS:
    getattr(signals, _name).connect(_tell, weak=False)


@signals.completed.connect
@signals.failed.connect
def _die_before_the_continuation(sender: Any, task_id: str, **_: Any) -> None:
    if isinstance(sender, IdempotentTask):
        Ledger.of(sender.app).die_if_told("before", task_id)


# The library notes in the record that the continuation is out when it hears the same signals; it
# has connected first.
@task_success.connect
@task_failure.connect
def _die_after_the_continuation(sender: Any, **_: Any) -> None:
    if sender.name.startswith("shop."):
        Ledger.of(sender.app).die_if_told("after", sender.request.id)


worker_init.connect(die_with_parent)
