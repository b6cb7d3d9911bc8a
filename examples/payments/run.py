"""The run itself: feed the events, kill a charge half-way, feed some again, gather evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import tasks
from .events import Deliveries
from .feed import Feed
from .journal import Journal
from .kill import kill_while_charging
from .ledger import Ledger
from .verdict import Evidence
from .worker import Worker

#: How many lines are fed behind the event to interrupt before its process is killed.
LINES_BEHIND = 40
#: Every such delivery is sent again at the end, as an operator's "resend" would.
RESEND_EVERY = 4


class Progress(Protocol):
    """Whoever watches."""

    def expect(self, answers: int) -> None:
        """So many answers will come."""

    def stage(self, description: str) -> None:
        """A new part of the run begins."""

    def answered(self) -> None:
        """One more delivery has its answer."""


@dataclass(frozen=True)
class Run:
    """One run of the demo against the Redis at `redis_url`, its files in `folder`."""

    deliveries: Deliveries
    redis_url: str
    folder: Path
    plain: bool
    progress: Progress

    def __call__(self) -> Evidence:
        """Do it all. Raises `WorkerError` or `NotKilledError` if it cannot be done."""
        started = time.monotonic()
        ledger, journal = Ledger(self.folder / "ledger.db"), Journal(self.folder / "ledger.db")
        ledger.create()
        journal.create()
        tasks.app.conf.update(broker_url=self.redis_url, result_backend=self.redis_url)

        interrupted = self.deliveries.event_to_interrupt()
        first_part, rest = self.deliveries.split_behind(interrupted, LINES_BEHIND)
        resent = self.deliveries[::RESEND_EVERY]
        self.progress.expect(len(self.deliveries) + len(resent))

        self.progress.stage("starting the worker")
        environment = self._environment(ledger, interrupted)
        task = tasks.charge_plain if self.plain else tasks.charge
        with (
            Worker(environment, log=self.folder / "worker.log") as worker,
            Feed(task, self.deliveries, worker.check, self.progress.answered) as feed,
        ):
            self.progress.stage("feeding events")
            feed.publish(first_part)

            self.progress.stage("killing a process in the middle of a charge")
            kill = kill_while_charging(interrupted, ledger, worker)

            self.progress.stage("feeding the rest")
            feed.publish(rest)
            feed.collect()

            self.progress.stage("feeding some again")
            feed.publish(resent)
            feed.collect()

            self.progress.stage("stopping the worker")

        return Evidence(
            deliveries=self.deliveries,
            answers=feed.answers,
            charges=ledger.charges(),
            signals=journal.counts(),
            kill=kill,
            recovery_seconds=kill.recovery_seconds(ledger),
            seconds=time.monotonic() - started,
        )

    def _environment(self, ledger: Ledger, interrupted: str) -> dict[str, str]:
        return {
            "CELERY_BROKER_URL": self.redis_url,
            "CELERY_RESULT_BACKEND": self.redis_url,
            tasks.LEDGER_VARIABLE: str(ledger.file),
            tasks.HANGING_EVENT_VARIABLE: interrupted,
        }
