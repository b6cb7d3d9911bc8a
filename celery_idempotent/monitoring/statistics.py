"""What all records together tell: how many, how large, how fast they come."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean

from celery_idempotent.configuration.app_tasks import IdempotentTaskLike, stores
from celery_idempotent.key.key import Key
from celery_idempotent.record.record import State
from celery_idempotent.store.record_query import RecordFilter, RecordView, record_views
from celery_idempotent.store.record_store import RecordStore

#: Seconds that the present rate is measured over, at most.
RATE_WINDOW = 3600.0


@dataclass
class TaskStatistics:
    """One task's records."""

    states: Counter[str] = field(default_factory=Counter)
    #: Records whose execution took over from one that died.
    taken_over: int = 0
    #: STARTED records whose lease has ended: nobody has taken over yet.
    lease_expired: int = 0
    #: Bytes a record, from the sample; None where none was there to be measured.
    bytes_per_record: float | None = None
    #: Outcomes a second.
    rate: float = 0.0
    #: Seconds that a result is kept; None for a task that this app does not have.
    retention: float | None = None

    @property
    def records(self) -> int:
        """All of them."""
        return sum(self.states.values())

    @property
    def bytes_total(self) -> float | None:
        """What they take, by the sample."""
        return None if self.bytes_per_record is None else self.bytes_per_record * self.records

    @property
    def bytes_projected(self) -> float | None:
        """What they come to if outcomes go on coming like this: rate × retention × size."""
        if self.bytes_per_record is None or self.retention is None:
            return None
        return self.rate * self.retention * self.bytes_per_record


def collect(
    tasks: Sequence[IdempotentTaskLike], sample: int, progress: Callable[[int], None]
) -> dict[str, TaskStatistics]:
    """Go over all records once. The result is by task name.

    Args:
        sample: how many records of each task are measured with MEMORY USAGE.
        progress: told how many records were seen, after each page.
    """
    collected: dict[str, _Collector] = defaultdict(lambda: _Collector(sample))
    for page in record_views(stores(tasks), RecordFilter(), expiry=False):
        for record_view in page:
            collected[record_view.key.task].take(record_view)
        progress(len(page))
    retention = {t.name: t.idempotency_configuration.settings.result_ttl for t in tasks}
    for name, collector in collected.items():
        collector.finish(retention.get(name))
    return {name: collected[name].statistics for name in sorted(collected)}


class _Collector:
    """Takes in one record of a task after the other, and keeps little of each."""

    def __init__(self, sample: int) -> None:
        self.statistics = TaskStatistics()
        self._sample = sample
        self._kept: list[tuple[RecordStore, Key]] = []
        self._recent = 0
        self._oldest_recent = 1.0

    def take(self, record_view: RecordView) -> None:
        """Count one."""
        record, statistics = record_view.record, self.statistics
        statistics.states["CORRUPT" if record is None else record.state.value] += 1
        if record is not None:
            statistics.taken_over += record.attempt > 1
            if record.state is State.STARTED:
                statistics.lease_expired += _over(record.deadline, record_view.now)
            if record.finished_at is not None:
                age = (record_view.now - record.finished_at).total_seconds()
                if age <= RATE_WINDOW:
                    self._recent += 1
                    self._oldest_recent = max(self._oldest_recent, age)
        self._maybe_keep(record_view)

    def _maybe_keep(self, record_view: RecordView) -> None:
        """Every record is in the sample with the same chance."""
        if len(self._kept) < self._sample:
            self._kept.append((record_view.store, record_view.key))
        elif (config := random.randrange(self.statistics.records)) < self._sample:
            self._kept[config] = (record_view.store, record_view.key)

    def finish(self, retention: float | None) -> None:
        """Measure the sample, and work out the rate."""
        statistics = self.statistics
        statistics.retention = retention
        if self._recent:
            # A task that began ten minutes ago has no hour to look at, nor one that forgets sooner.
            statistics.rate = self._recent / min(retention or RATE_WINDOW, self._oldest_recent)
        by_store: dict[RecordStore, list[Key]] = defaultdict(list)
        for store, key in self._kept:
            by_store[store].append(key)
        sizes: list[int] = []
        for store, keys in by_store.items():
            with store.open_reader() as open_reader:
                sizes += open_reader.bytes_used(keys)
        if sizes:
            statistics.bytes_per_record = fmean(sizes)


def _over(deadline: datetime | None, now: datetime) -> bool:
    return deadline is not None and deadline <= now
