"""Statistics of all records: their number, size and rate, by task."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike, stores
from celery_idempotent.core.events.table import DECISIONS, REASONS, REFUSED_FOR
from celery_idempotent.core.record import State
from celery_idempotent.operations.records.query import RecordFilter, record_views
from celery_idempotent.operations.records.reader import RecordReader, RecordView

#: Maximum seconds over which the rate is measured.
RATE_WINDOW = 3600.0

#: Maximum number of names with a row of their own that are not tasks of the app; the others share
#: one. A client that can write to Redis could otherwise fill the memory with names.
MAX_NAMES = 100
OTHER_NAMES = "(other names)"

STATES = tuple(state.value for state in State)


@dataclass
class TaskStatistics:
    """Statistics of one task's records."""

    states: Counter[str] = field(default_factory=Counter)
    #: Records with an attempt above 1: an earlier execution died.
    takeovers: int = 0
    #: STARTED records with an expired lease that no execution has taken over yet.
    lease_expired: int = 0
    #: Number of outcomes in the last hour.
    recent: int = 0
    #: Age of the oldest of these outcomes in seconds; at least 1, so that one new record is not a
    #: high rate.
    oldest_recent: float = 1.0
    #: The records whose memory is measured.
    sample: list[RecordView] = field(default_factory=list)

    def add(self, view: RecordView, sample_size: int) -> None:
        """Counts a record."""
        self.states[view.state] += 1
        self.lease_expired += view.is_expired
        # Reservoir sampling: each record is equally likely to be in the sample.
        if len(self.sample) < sample_size:
            self.sample.append(view)
        elif (index := random.randrange(self.states.total())) < sample_size:
            self.sample[index] = view
        if view.record is None:
            return
        self.takeovers += view.record.attempt > 1
        if view.record.finished_at is not None:
            age = (view.now - view.record.finished_at).total_seconds()
            if age <= RATE_WINDOW:
                self.recent += 1
                self.oldest_recent = max(self.oldest_recent, age)

    def to_json(self, retention: float | None, counter: Mapping[str, int]) -> dict[str, Any]:
        """Measures the sample, and returns the statistics as a JSON object.

        Args:
            retention: seconds for which a result is kept; None for a task unknown to this app.
            counter: the workers' counters.
        """
        calls = sum(counter.get(name, 0) for name in ("run", "takeover", "replay"))
        number, sizes = self.states.total(), _sizes(self.sample)
        size = fmean(sizes) if sizes else None
        # The rate is measured since the oldest outcome of the last hour, or over the retention if
        # that is shorter, because older records have expired.
        rate = self.recent / min(retention or RATE_WINDOW, self.oldest_recent)
        return {
            "records": number,
            "states": {state: self.states[state] for state in (*STATES, "CORRUPT")},
            "takeovers": self.takeovers,
            "lease_expired": self.lease_expired,
            "bytes_per_record": size,
            "bytes_total": None if size is None else size * number,
            "per_second": rate,
            "retention": retention,
            "bytes_projected": rate * retention * size if size and retention else None,
            "counts": dict(counter),
            "decisions": sum(counter.get(decision, 0) for decision in DECISIONS),
            "refused": refusals(counter),
            "double_executions": double_executions(counter),
            # The share of calls that were replayed.
            "hit_ratio": counter.get("replay", 0) / calls if calls else None,
        }


def refusals(counter: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of refusals by reason."""
    counts = {reason: counter.get(REFUSED_FOR + reason, 0) for reason in REASONS}
    return {reason: number for reason, number in counts.items() if number}


def double_executions(counter: Mapping[str, int]) -> int:
    """Returns the number of calls in shadow that ran although another call had their key."""
    names = ("would_replay", "would_conflict", "would_deduplicate")
    return sum(counter.get(name, 0) for name in names)


def collect(
    tasks: Sequence[IdempotentTaskLike],
    counters: Mapping[str, Mapping[str, int]],
    sample_size: int,
) -> dict[str, dict[str, Any]]:
    """Scans all records once and returns the statistics by task name, as JSON objects.

    Names that are neither tasks nor counted share one entry beyond `MAX_NAMES`.

    Args:
        counters: the workers' counters, by task.
        sample_size: how many records of each task are measured with MEMORY USAGE.
    """
    retention = {t.name: t.idempotency_configuration.settings.result_ttl for t in tasks}
    statistics = {name: TaskStatistics() for name in (*retention, *counters)}
    limit = len(statistics) + MAX_NAMES
    for page in record_views(stores(tasks), RecordFilter(), expiry=False):
        for view in page:
            name = view.key.task
            if name not in statistics and len(statistics) >= limit:
                name = OTHER_NAMES
            statistics.setdefault(name, TaskStatistics()).add(view, sample_size)
    return {
        name: found.to_json(retention.get(name), counters.get(name, {}))
        for name, found in sorted(statistics.items())
        if found.states or name in counters
    }


def _sizes(views: list[RecordView]) -> list[int]:
    sizes: list[int] = []
    for store in {view.store for view in views}:
        with RecordReader.open(store) as reader:
            sizes += reader.bytes_used([view.key for view in views if view.store == store])
    return sizes
