"""One run: a worker works, the outage strikes in the middle, and everybody is waited for."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

from celery.states import READY_STATES
from kombu.exceptions import OperationalError

from tests.labs.outages.app import CHARGE, NAME, SETTINGS_VARIABLE, make_app
from tests.labs.outages.ledger import Ledger
from tests.labs.outages.outage import Outage, Stage
from tests.labs.outages.verdict import Disposition, Message, judge
from tests.worker.harness import WorkerProcess

#: Of the pool.
PROCESSES = 2
#: Messages published a second, about half of what a worker can do.
PACE = 100.0
#: One message of so many repeats an earlier one.
REPEATS = 5
#: Part of the messages that come before the outage.
BEFORE = 0.3
#: Longest wait for the last answer, in seconds.
PATIENCE = 60.0
#: … once all that are missing are of messages that no worker has received.
PATIENCE_WITH_BROKER = 15.0
POLL_INTERVAL = 0.25

#: What callers are told, by task id.
ReplyReader = dict[str, Mapping[str, Any]]
#: Told now and then how many messages have their answer.
Progress = Callable[[int], None]


def run(
    outage: Outage,
    messages: int,
    settings: Mapping[str, Any],
    folder: Path,
    progress: Progress,
) -> Disposition:
    """Live through `outage`.

    Args:
        settings: of the app; the outage's own go before them.
        folder: for the ledger and the worker's log.
    """
    ledger_file = folder / f"{outage.name}.ledger"
    ledger_file.write_bytes(b"")
    with outage.stage() as stage, ThreadPoolExecutor(1) as fate:
        whole = {
            **settings,
            "task_default_queue": outage.name,
            "outage_ledger": str(ledger_file),
            **stage.open(),
            **outage.settings,
        }
        if outage.at_start:
            back_at = _strike(outage, stage, fate)
        with _Shop(outage, whole, folder) as shop:
            for number, message in enumerate(_messages(messages, outage.name)):
                if number == int(BEFORE * messages) and not outage.at_start:
                    back_at = _strike(outage, stage, fate)
                shop.publish(message)
                time.sleep(1 / PACE)
            answers = shop.wait_for_answers(progress)
            return judge(
                shop.sent,
                answers,
                shop.ledger,
                back_at=back_at.result(),
                restarts=shop.restarts,
            )


def _strike(outage: Outage, stage: Stage, fate: ThreadPoolExecutor) -> Future[float]:
    """Strike, and mend it in time; the moment at which the store is back."""

    def mend() -> float:
        time.sleep(outage.seconds)
        stage.mend()
        return time.time()

    struck = fate.submit(stage.trigger)
    if outage.at_start:
        struck.result()
    return fate.submit(mend)


def _messages(number: int, run: str) -> Iterator[Message]:
    """So many, as always in a `run` of that name; now and then one repeats an earlier order."""
    chance = random.Random(run)
    orders: list[str] = []
    for place in range(1, number + 1):
        task_id = str(UUID(int=chance.getrandbits(128), version=4))
        if place % REPEATS:
            orders.append(f"order-{place}")
            yield Message(task_id, orders[-1])
        else:
            yield Message(task_id, chance.choice(orders))


class _Shop:
    """A worker, and whoever sends it messages and waits for its answers."""

    def __init__(self, outage: Outage, settings: Mapping[str, Any], folder: Path) -> None:
        self.sent: list[Message] = []
        self.restarts = 0
        self.ledger = Ledger(folder / f"{outage.name}.ledger")
        self._app = make_app(settings)
        self._worker = WorkerProcess(
            outage.name,
            ("--concurrency", str(PROCESSES)),
            {SETTINGS_VARIABLE: json.dumps(settings)},
            folder / f"{outage.name}.log",
            app=NAME,
        )
        if not outage.at_start:
            self._worker.ready()

    def publish(self, message: Message) -> None:
        """Until the broker accepts it: what it has not accepted, nobody can lose."""
        while True:
            self._supervise()
            try:
                self._app.send_task(CHARGE, (message.order,), task_id=message.task_id)
            except OperationalError:
                time.sleep(POLL_INTERVAL)
            else:
                self.sent.append(message)
                return

    def wait_for_answers(self, progress: Progress) -> ReplyReader:
        """What callers are told, as far as that comes in time."""
        answers: ReplyReader = {}
        began_at = time.monotonic()
        while waiting := [m.task_id for m in self.sent if m.task_id not in answers]:
            timeout = PATIENCE if self._received(waiting) else PATIENCE_WITH_BROKER
            if time.monotonic() > began_at + timeout:
                break
            time.sleep(POLL_INTERVAL)
            self._supervise()
            for task_id in waiting:
                answer = self._app.backend.get_task_meta(task_id)
                if answer["status"] in READY_STATES:
                    answers[task_id] = answer
            progress(len(answers))
        return answers

    def _received(self, task_ids: Sequence[str]) -> bool:
        """Whether a worker has received any of these."""
        received = {message["task_id"] for message in self.ledger.read("received")}
        return not received.isdisjoint(task_ids)

    def _supervise(self) -> None:
        """Start the worker again if it has ended by itself, as a service manager would."""
        if self._worker.status == "exited":
            self._worker.start()
            self.restarts += 1

    def __enter__(self) -> _Shop:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill("SIGKILL")
        self._app.close()
        self.ledger.close()
