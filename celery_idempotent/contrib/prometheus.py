"""Prometheus metrics of a worker and its pool processes, or of another process.

The setting ``idempotency_metrics`` enables them: a port on the loopback interface, or a host and a
port, such as ``"0.0.0.0:9808"``. Pool processes write their values to files (prometheus_client's
multiprocess mode), and the main process serves the sums. Other programs call :func:`connect`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import prometheus_client
from celery.signals import task_postrun, worker_process_init, worker_ready, worker_shutdown
from prometheus_client import CollectorRegistry, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from celery_idempotent import signals
from celery_idempotent.core import shared_counters
from celery_idempotent.core.events.report import counters
from celery_idempotent.core.events.table import REFUSED_FOR
from celery_idempotent.core.lease.heartbeat import heartbeat
from celery_idempotent.errors import SettingsError
from celery_idempotent.redelivery import renewal

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

#: Buckets of the duration of a begin in seconds, from a local server to an overloaded one.
BEGIN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
#: Buckets of the time until a takeover in seconds, from a killed pool process, whose lease is ended
#: at once, to a lost host.
TAKEOVER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

#: Counters with a label beside ``task``: name, help text, label and its values.
_COUNTERS = (
    ("decisions", "Decisions about calls", "decision", signals.DECISIONS),
    ("outcomes", "Ends of executions", "outcome", signals.OUTCOMES),
    ("refused", "Calls that were refused, at a begin or a publish", "reason", signals.REASONS),
)
#: The series of each task that exist before anything is counted: name suffix, and labels beside
#: ``task``.
_SERIES: dict[str, list[tuple[str, dict[str, str]]]] = {
    **{
        f"celery_idempotent_{name}": [
            ("_total", {label: value}) for value in values if value not in signals.SHADOW
        ]
        for name, _, label, values in _COUNTERS
    },
    "celery_idempotent_deduplicated": [("_total", {})],
    "celery_idempotent_bypassed": [("_total", {})],
    "celery_idempotent_takeover_seconds": [
        *(("_bucket", {"le": str(limit)}) for limit in TAKEOVER_BUCKETS),
        *(("_bucket", {"le": "+Inf"}), ("_count", {}), ("_sum", {})),
    ],
}


ExpiredLeases = Callable[[], "Counter[str] | None"]


def address(setting: Any) -> tuple[str, int]:
    """Returns the host and the port of the setting ``idempotency_metrics``.

    A port alone means the loopback interface, because the metrics name tasks and need no password.

    Raises:
        SettingsError: if the setting is neither a port nor ``host:port``.
    """
    match = re.fullmatch(r"(?:\[([^]]+)\]:|([^:]+):)?([0-9]{1,5})", str(setting))
    if isinstance(setting, bool) or match is None or not 0 < int(match[3]) < 65536:
        raise SettingsError(
            'idempotency_metrics must be a port, which is served at 127.0.0.1, or "host:port", '
            'such as "0.0.0.0:9808" for all interfaces'
        )
    return match[1] or match[2] or "127.0.0.1", int(match[3])


class Metrics:
    """The metrics of a process.

    A worker creates them before the pool, whose processes inherit the object.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # In a worker, this registry is not served: `_PoolCollector` reads the files of all
        # processes.
        registry = registry or CollectorRegistry()
        common: Any = {"namespace": "celery_idempotent", "registry": registry}
        counter: Any = partial(prometheus_client.Counter, **common)
        histogram: Any = partial(prometheus_client.Histogram, **common)
        self._decisions, self._outcomes, self._refused = (
            counter(name, f"{text}: {', '.join(values)}.", ["task", label])
            for name, text, label, values in _COUNTERS
        )
        self._deduplicated = counter(
            "deduplicated",
            "Calls that were not published, because another one has their key.",
            ["task"],
        )
        self._bypassed = counter(
            "bypassed",
            "Messages whose bodies ran outside of the task's __call__, unprotected.",
            ["task"],
        )
        self._begin_seconds = histogram(
            "begin_seconds",
            "Round-trip time of a begin, by the case of its reply.",
            ["task", "case"],
            buckets=BEGIN_BUCKETS,
        )
        self._takeover_seconds = histogram(
            "takeover_seconds",
            "From the expiry of a dead execution's lease to the begin of the next execution.",
            ["task"],
            buckets=TAKEOVER_BUCKETS,
        )
        self._heartbeats_replaced = counter(
            "heartbeats_replaced",
            "Threads that renew leases, and were replaced because they died or were late.",
        )
        gauge: Any = partial(prometheus_client.Gauge, **common)
        self._leases_held = gauge("leases_held", "Leases held now.", multiprocess_mode="livesum")
        self._messages_held = gauge(
            "messages_held",
            "Messages that the worker had at the last renewal, and keeps from redelivery.",
            multiprocess_mode="livesum",
        )
        self._messages_renewed = gauge(
            "messages_renewed_timestamp_seconds",
            "When the worker last kept its messages from redelivery.",
            multiprocess_mode="livemax",
        )

    def connect(self) -> None:
        """Starts counting in this process and its forks."""
        signals.begun.connect(self._set_leases_held, weak=False)
        signals.taken_over.connect(self._on_taken_over, weak=False)
        signals.begin_replied.connect(self._on_begin_replied, weak=False)
        counters.append(self._count)
        task_postrun.connect(self._set_leases_held, weak=False)  # by then, the lease has ended
        heartbeat.on_replaced = self._heartbeats_replaced.inc
        renewal.on_renewed.append(self._on_renewed)

    def _count(self, name: str, task: str) -> None:
        if name in signals.DECISIONS:
            self._decisions.labels(task, name).inc()
        elif name in signals.OUTCOMES:
            self._outcomes.labels(task, name).inc()
        elif name.startswith(REFUSED_FOR):
            self._refused.labels(task, name.removeprefix(REFUSED_FOR)).inc()
        elif name == "deduplicated":
            self._deduplicated.labels(task).inc()
        elif name == "bypassed":
            self._bypassed.labels(task).inc()

    def _set_leases_held(self, **_: Any) -> None:
        self._leases_held.set(len(heartbeat.leases()))

    def _on_renewed(self, number: int) -> None:
        self._messages_held.set(number)
        self._messages_renewed.set_to_current_time()

    def _on_taken_over(self, key: str, orphaned_seconds: float, **_: Any) -> None:
        self._takeover_seconds.labels(_task_name(key)).observe(orphaned_seconds)

    def _on_begin_replied(self, key: str, case: str, seconds: float, **_: Any) -> None:
        self._begin_seconds.labels(_task_name(key), case).observe(seconds)


def _task_name(key: str) -> str:
    """Returns the name in ``name:digest``: the sender may be a function, which has no `name`."""
    return unquote(key.rpartition(":")[0])


@dataclass(frozen=True)
class _PoolCollector(Collector):
    """Sums the metrics of all pool processes, including dead ones."""

    #: The directory of the processes' files.
    directory: str
    metrics: Metrics
    #: Names of the tasks whose series are served before anything is counted.
    tasks: frozenset[str]
    #: The argument of :func:`start`.
    expired_leases: ExpiredLeases

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics, without the gauges of dead processes."""
        for file in Path(self.directory).glob("gauge_live*_*.db"):
            pid = int(file.stem.rpartition("_")[2])
            if not shared_counters.is_alive(pid):
                mark_process_dead(pid, self.directory)
        collector = MultiProcessCollector(None, self.directory)
        families = {family.name: family for family in collector.collect()}
        for metric in vars(self.metrics).values():
            for family in metric.describe():
                families.setdefault(family.name, family)
        self._add_zeros(families)
        return [*families.values(), *self._expired()]

    def _expired(self) -> Iterator[Metric]:
        """Yields the gauge of expired leases, which a frozen pool process cannot provide."""
        expired = self.expired_leases()
        if expired is not None:
            gauge = expired_gauge()
            for task in self.tasks:
                gauge.add_metric([task], expired[task])
            yield gauge

    def _add_zeros(self, families: Mapping[str, Metric]) -> None:
        """Adds the series that tasks and other counted names do not have yet.

        Prometheus computes an increase from the first value of a series. It would miss the event
        that creates a series, which is usually the only one of its kind.
        """
        samples = [sample for family in families.values() for sample in family.samples]
        existing = {(sample.name, frozenset(sample.labels.items())) for sample in samples}
        names = {sample.labels["task"] for sample in samples if "task" in sample.labels}
        for family_name, series in _SERIES.items():
            for task in names | self.tasks:
                for suffix, label in series:
                    name, labels = family_name + suffix, {"task": task, **label}
                    if (name, frozenset(labels.items())) not in existing:
                        families[family_name].add_sample(name, labels, 0.0)


def expired_gauge() -> Any:
    """Returns the gauge of expired leases, which only a worker's main process serves."""
    text = "Executions that run although their lease has expired."
    return GaugeMetricFamily("celery_idempotent_leases_expired", text, labels=["task"])


def connect(registry: CollectorRegistry | None = None) -> None:
    """Starts counting the calls of a process other than a worker.

    A program that publishes calls or uses `Idempotency` must serve the registry itself.

    Args:
        registry: by default, prometheus_client's own.

    Raises:
        ValueError: if the registry already has these metrics.
    """
    Metrics(registry or prometheus_client.REGISTRY).connect()


def start(setting: Any, tasks: Iterable[str], expired_leases: ExpiredLeases) -> None:
    """Starts counting, and serves the metrics once the worker is ready.

    Args:
        setting: as for :func:`address`.
        tasks: names of the worker's idempotent tasks.
        expired_leases: returns the number of the worker's executions with an expired lease by
            task, or None if unknown.

    Raises:
        SettingsError: if the setting is invalid.
    """
    host, port = address(setting)
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        directory = os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="idempotency-metrics-")
        worker_shutdown.connect(partial(_remove, directory, os.getpid()), weak=False)
    values.ValueClass = values.get_value_class()  # from now on, values are written to files
    metrics = Metrics()
    metrics.connect()

    def serve(**_: Any) -> None:
        registry = CollectorRegistry()
        registry.register(_PoolCollector(directory, metrics, frozenset(tasks), expired_leases))
        try:
            server, _thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            logger.error("Cannot serve the idempotency metrics at %s:%d: %s", host, port, error)
            return
        # A pool process that starts later inherits the socket. Unless it closes it, the port stays
        # in use after the main process has ended.
        worker_process_init.connect(lambda **_: server.socket.close(), weak=False)
        logger.info("Serving idempotency metrics at http://%s:%d/metrics", host, port)

    worker_ready.connect(serve, weak=False)


def _remove(directory: str, main_pid: int, **_: Any) -> None:
    if os.getpid() == main_pid:
        # After SIGHUP, Celery replaces the process by a new worker with this environment, which
        # must not name a deleted directory.
        os.environ.pop(DIRECTORY_VARIABLE, None)
        shutil.rmtree(directory, ignore_errors=True)
