"""Statistics over all records: their number, size and rate, by task."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike, stores
from celery_idempotent.key.key import Key
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views
from celery_idempotent.store.inspection.record_reader import RecordView
from celery_idempotent.store.record_store import RecordStore

#: Seconds over which the rate is measured, at most.
RATE_WINDOW = 3600.0


@dataclass
class TaskStatistics:
    """Statistics of one task's records."""

    states: Counter[str] = field(default_factory=Counter)
    #: Records whose attempt is above 1: an earlier execution died.
    takeovers: int = 0
    #: STARTED records whose lease has expired and that no execution has taken over yet.
    lease_expired: int = 0
    #: Mean size in the sample; None if no record was measured.
    bytes_per_record: float | None = None
    #: Outcomes per second.
    per_second: float = 0.0
    #: Seconds for which a result is kept; None for a task that this app does not have.
    retention: float | None = None

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
        """Size that the records approach at the present rate: rate × retention × size."""
        if self.bytes_per_record is None or self.retention is None:
            return None
        return self.per_second * self.retention * self.bytes_per_record


def double_executions(counter: Mapping[str, int]) -> int:
    """Returns how many calls in shadow ran, and would have got another call's outcome."""
    names = ("would_replay", "would_conflict", "would_deduplicate")
    return sum(counter.get(name, 0) for name in names)


def collect(
    tasks: Sequence[IdempotentTaskLike], sample: int, progress: Callable[[int], None]
) -> dict[str, TaskStatistics]:
    """Scans all records once, and returns the statistics by task name.

    Args:
        sample: how many records of each task are measured with MEMORY USAGE.
        progress: called after each page with its number of records.
    """
    collectors: dict[str, _Collector] = defaultdict(lambda: _Collector(sample))
    for page in record_views(stores(tasks), RecordFilter(), expiry=False):
        for view in page:
            collectors[view.key.task].add(view)
        progress(len(page))
    retention = {t.name: t.idempotency_configuration.settings.result_ttl for t in tasks}
    return {name: collectors[name].finish(retention.get(name)) for name in sorted(collectors)}


class _Collector:
    """Adds up one task's records, and keeps the keys of a random sample."""

    def __init__(self, sample: int) -> None:
        self._statistics = TaskStatistics()
        self._sample = sample
        self._sampled: list[tuple[RecordStore, Key]] = []
        self._recent = 0
        #: Seconds; at least one, so that a single new record does not count as a high rate.
        self._oldest_recent = 1.0

    def add(self, view: RecordView) -> None:
        """Adds one record."""
        record, statistics = view.record, self._statistics
        statistics.states[view.state] += 1
        statistics.lease_expired += view.is_expired
        if record is not None:
            statistics.takeovers += record.attempt > 1
            if record.finished_at is not None:
                age = (view.now - record.finished_at).total_seconds()
                if age <= RATE_WINDOW:
                    self._recent += 1
                    self._oldest_recent = max(self._oldest_recent, age)
        self._add_to_sample(view)

    def _add_to_sample(self, view: RecordView) -> None:
        # Reservoir sampling: each record is in the sample with the same probability.
        if len(self._sampled) < self._sample:
            self._sampled.append((view.store, view.key))
        elif (index := random.randrange(self._statistics.records)) < self._sample:
            self._sampled[index] = (view.store, view.key)

    def finish(self, retention: float | None) -> TaskStatistics:
        """Measures the sample, and returns the statistics."""
        statistics = self._statistics
        statistics.retention = retention
        if self._recent:
            # The window is shorter if the first outcome is younger, or if records expire sooner.
            window = min(retention or RATE_WINDOW, self._oldest_recent)
            statistics.per_second = self._recent / window
        by_store: dict[RecordStore, list[Key]] = defaultdict(list)
        for store, key in self._sampled:
            by_store[store].append(key)
        sizes: list[int] = []
        for store, keys in by_store.items():
            with store.open_reader() as reader:
                sizes += reader.bytes_used(keys)
        if sizes:
            statistics.bytes_per_record = fmean(sizes)
        return statistics
