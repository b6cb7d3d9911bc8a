"""Runs the demo: publishes the events, kills a process, republishes some, collects the evidence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from . import tasks
from .events import Deliveries
from .journal import Journal
from .kill import kill_while_charging
from .ledger import Ledger
from .publisher import Publisher
from .verdict import Evidence
from .worker import Worker

#: How many deliveries are published after the interrupted event before its process is killed.
LINES_AFTER = 40
#: The signals of calls that have run, and would not have run without shadow.
PREVENTABLE = ("would_replay", "would_conflict", "would_refuse")
#: Every fourth delivery is published again at the end.
RESEND_EVERY = 4


class Progress(Protocol):
    """Shows the progress of a run."""

    def expect(self, replies: int) -> None:
        """Sets the number of replies to come."""

    def stage(self, description: str) -> None:
        """Shows the current stage of the run."""

    def reply_received(self) -> None:
        """Counts the reply to one delivery."""


@dataclass(frozen=True)
class Run:
    """One run of the demo, with the Redis at `redis_url` and its files in `folder`."""

    deliveries: Deliveries
    redis_url: str
    folder: Path
    #: A plain task instead of an idempotent one.
    plain: bool
    #: The idempotent task in shadow.
    shadow: bool
    progress: Progress

    def __call__(self) -> Evidence:
        """Runs the demo; raises `WorkerError` or `NotKilledError` if it cannot be run."""
        started = time.monotonic()
        ledger, journal = Ledger(self.folder / "ledger.db"), Journal(self.folder / "ledger.db")
        ledger.create()
        journal.create()
        tasks.app.conf.update(
            broker_url=self.redis_url,
            result_backend=self.redis_url,
            idempotency_shadow=self.shadow,
        )

        interrupted = self.deliveries.event_to_interrupt()
        first_part, rest = self.deliveries.split_after(interrupted, LINES_AFTER)
        resent = self.deliveries[::RESEND_EVERY]
        self.progress.expect(len(self.deliveries) + len(resent))

        self.progress.stage("starting the worker")
        environment = self._environment(ledger, interrupted)
        task = tasks.charge_plain if self.plain else tasks.charge
        with (
            Worker(environment, log=self.folder / "worker.log") as worker,
            Publisher(
                task, self.deliveries, worker.check, self.progress.reply_received
            ) as publisher,
        ):
            self.progress.stage("publishing events")
            publisher.publish(first_part)

            self.progress.stage("killing a process during a charge")
            kill = kill_while_charging(interrupted, ledger, worker)

            self.progress.stage("publishing the rest")
            publisher.publish(rest)
            publisher.collect()

            self.progress.stage("publishing some again")
            publisher.publish(resent)
            publisher.collect()

            self.progress.stage("stopping the worker")

        return Evidence(
            deliveries=self.deliveries,
            replies=publisher.replies,
            charges=ledger.charges(),
            signals=journal.counts(),
            preventable=journal.task_ids(*PREVENTABLE) if self.shadow else None,
            kill=kill,
            recovery_seconds=kill.recovery_seconds(ledger),
            seconds=time.monotonic() - started,
        )

    def _environment(self, ledger: Ledger, interrupted: str) -> dict[str, str]:
        return {
            **({tasks.SHADOW_VARIABLE: "1"} if self.shadow else {}),
            "CELERY_BROKER_URL": self.redis_url,
            "CELERY_RESULT_BACKEND": self.redis_url,
            tasks.LEDGER_VARIABLE: str(ledger.file),
            tasks.HANGING_EVENT_VARIABLE: interrupted,
        }
