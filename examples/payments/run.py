"""Runs the demo: publishes the events, kills processes, republishes some, collects the evidence."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from . import tasks
from .database import LEDGER_VARIABLE
from .events import Deliveries
from .journal import Journal
from .kill import kill_after_commit, kill_while_charging
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
        ledger, journal = Ledger(self.folder / "ledger.db"), Journal(self.folder / "journal.db")
        ledger.create()
        journal.create()
        tasks.app.conf.update(broker_url=self.redis_url, result_backend=self.redis_url)
        tasks.configure(shadow=self.shadow)

        interrupted = self.deliveries.event_to_interrupt()
        first_part, after, rest = self.deliveries.split_after(interrupted, LINES_AFTER)
        begin = len(first_part) + len(after)
        committed = self.deliveries.event_to_interrupt(begin) or interrupted
        resent = self.deliveries[::RESEND_EVERY]
        self.progress.expect(len(self.deliveries) + len(resent))

        self.progress.stage("starting the worker")
        environment = self._environment(ledger, journal, interrupted, committed)
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
            publish_more = partial(publisher.publish, after)
            kill = kill_while_charging(interrupted, journal, ledger, worker, publish_more)

            self.progress.stage("publishing the rest")
            with ThreadPoolExecutor() as threads:
                places = (committed, journal, ledger, worker)
                killing = None if self.shadow else threads.submit(kill_after_commit, *places)
                publisher.publish(rest)
            after_commit = None if killing is None else killing.result()
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
            recovery_seconds=kill.recovery_seconds(journal),
            kill_after_commit=after_commit,
            seconds=time.monotonic() - started,
        )

    def _environment(
        self, ledger: Ledger, journal: Journal, interrupted: str, committed: str
    ) -> dict[str, str]:
        variables = {
            "CELERY_BROKER_URL": self.redis_url,
            "CELERY_RESULT_BACKEND": self.redis_url,
            LEDGER_VARIABLE: str(ledger.file),
            tasks.JOURNAL_VARIABLE: str(journal.file),
            tasks.HANGING_EVENT_VARIABLE: interrupted,
        }
        if self.shadow:
            return {**variables, tasks.SHADOW_VARIABLE: "1"}
        return {**variables, tasks.COMMITTED_EVENT_VARIABLE: committed}
