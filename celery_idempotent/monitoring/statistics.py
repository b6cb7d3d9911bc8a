"""Statistics of all records: their number, size and rate, by task."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike, stores
from celery_idempotent.key.key import Key
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views
from celery_idempotent.store.inspection.record_reader import RecordReader, RecordView
from celery_idempotent.store.record_store import RecordStore

#: Maximum seconds over which the rate is measured.
RATE_WINDOW = 3600.0


@dataclass
class TaskStatistics:
    """Statistics of one task's records."""

    states: Counter[str] = field(default_factory=Counter)
    #: Records with an attempt above 1: an earlier execution died.
    takeovers: int = 0
    #: STARTED records with an expired lease that no execution has taken over yet.
    lease_expired: int = 0
    #: Mean size in the sample; None if no record was measured.
    bytes_per_record: float | None = None
    #: Outcomes per second.
    per_second: float = 0.0
    #: Seconds for which a result is kept; None for a task unknown to this app.
    retention: float | None = None
    #: Outcomes of the last hour, and the age of the oldest, at least one second: otherwise a single
    #: new record would count as a high rate.
    recent: int = 0
    oldest_recent: float = 1.0

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(self.states.values())

    @property
    def bytes_total(self) -> float | None:
        """Size of all records, estimated from the sample."""
        return None if self.bytes_per_record is None else self.bytes_per_record * self.records

    @property
    def bytes_projected(self) -> float | None:
        """Expected size at the present rate: rate × retention × size per record."""
        if self.bytes_per_record is None or self.retention is None:
            return None
        return self.per_second * self.retention * self.bytes_per_record


def double_executions(counter: Mapping[str, int]) -> int:
    """Returns the number of shadow executions that idempotency would have prevented."""
    names = ("would_replay", "would_conflict", "would_deduplicate")
    return sum(counter.get(name, 0) for name in names)


def collect(
    tasks: Sequence[IdempotentTaskLike], sample: int, progress: Callable[[int], None]
) -> dict[str, TaskStatistics]:
    """Scans all records once and returns the statistics by task name.

    Args:
        sample: how many records of each task are measured with MEMORY USAGE.
        progress: called after each page with its number of records.
    """
    statistics: dict[str, TaskStatistics] = defaultdict(TaskStatistics)
    sampled: dict[str, list[RecordView]] = defaultdict(list)
    for page in record_views(stores(tasks), RecordFilter(), expiry=False):
        for view in page:
            task = view.key.task
            _add(statistics[task], view)
            # Reservoir sampling: each record is equally likely to be in the sample.
            if len(sampled[task]) < sample:
                sampled[task].append(view)
            elif (index := random.randrange(statistics[task].records)) < sample:
                sampled[task][index] = view
        progress(len(page))
    retention = {t.name: t.idempotency_configuration.settings.result_ttl for t in tasks}
    for task, found in statistics.items():
        found.retention = retention.get(task)
        # The window is shorter if the oldest outcome is younger or records expire sooner.
        found.per_second = found.recent / min(found.retention or RATE_WINDOW, found.oldest_recent)
        if sizes := _sizes(sampled[task]):
            found.bytes_per_record = fmean(sizes)
    return dict(sorted(statistics.items()))


def _add(statistics: TaskStatistics, view: RecordView) -> None:
    record = view.record
    statistics.states[view.state] += 1
    statistics.lease_expired += view.is_expired
    if record is None:
        return
    statistics.takeovers += record.attempt > 1
    if record.finished_at is not None:
        age = (view.now - record.finished_at).total_seconds()
        if age <= RATE_WINDOW:
            statistics.recent += 1
            statistics.oldest_recent = max(statistics.oldest_recent, age)


def _sizes(views: list[RecordView]) -> list[int]:
    by_store: dict[RecordStore, list[Key]] = defaultdict(list)
    for view in views:
        by_store[view.store].append(view.key)
    sizes: list[int] = []
    for store, keys in by_store.items():
        with RecordReader.open(store) as reader:
            sizes += reader.bytes_used(keys)
    return sizes
