"""Prometheus metrics of a worker and all processes of its pool.

The setting ``idempotency_metrics`` turns them on: a port, or ``"127.0.0.1:9808"``. The pool's
processes count in files (prometheus_client's multiprocess mode); the main process serves the sums.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.signals import task_postrun, worker_process_init, worker_ready, worker_shutdown

from celery_idempotent import signals
from celery_idempotent.errors import SettingsError
from celery_idempotent.lease.heartbeat import heartbeat

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

#: Seconds: from a server next door to one in trouble.
BEGIN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
#: Seconds: from a process that its parent saw die to a host that nobody did.
TAKEOVER_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

_LIVE = re.compile(r"gauge_live\w*_(\d+)\.db")


def address(setting: Any) -> tuple[str, int]:
    """Host and port of the setting ``idempotency_metrics``.

    Raises:
        SettingsError: if it is neither a port nor ``host:port``.
    """
    host, _, port = str(setting).rpartition(":")
    if isinstance(setting, bool) or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError('idempotency_metrics must be a port, or "host:port"')
    return host or "0.0.0.0", int(port)


class Metrics:
    """What is counted. Made before the pool is, so that its processes have it."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # Values live in files; what is served is made of these, not of a registry of this process.
        here = CollectorRegistry()
        self._decisions = Counter(
            "celery_idempotent_decisions",
            "Calls at the gate: run, takeover, replay, conflict, store_unavailable.",
            ["task", "decision"],
            registry=here,
        )
        self._outcomes = Counter(
            "celery_idempotent_outcomes",
            "Ends of executions: completed, failed, released, lease_lost, outcome_unsaved.",
            ["task", "outcome"],
            registry=here,
        )
        self._begin = Histogram(
            "celery_idempotent_begin_seconds",
            "Round trip of a begin, by what Redis answered.",
            ["task", "case"],
            buckets=BEGIN_BUCKETS,
            registry=here,
        )
        self._takeover = Histogram(
            "celery_idempotent_takeover_seconds",
            "From the end of a dead execution's lease to the beginning of the next.",
            ["task"],
            buckets=TAKEOVER_BUCKETS,
            registry=here,
        )
        self._held = Gauge(
            "celery_idempotent_leases_held",
            "Leases that are held now.",
            multiprocess_mode="livesum",
            registry=here,
        )

    def connect(self) -> None:
        """Count from now on, here and in every process that this one forks."""
        signals.begun.connect(self._on_begun, weak=False)
        signals.taken_over.connect(self._on_taken_over, weak=False)
        signals.begin_replied.connect(self._on_begin_replied, weak=False)
        for signal, decision in (
            (signals.replayed, "replay"),
            (signals.conflicted, "conflict"),
            (signals.store_unavailable, "store_unavailable"),
        ):
            signal.connect(self._counting(self._decisions, decision), weak=False)
        for signal in (
            signals.completed,
            signals.failed,
            signals.released,
            signals.lease_lost,
            signals.outcome_unsaved,
        ):
            name = signal.name.removeprefix(signals.PREFIX)
            signal.connect(self._counting(self._outcomes, name), weak=False)
        task_postrun.connect(self._on_end, weak=False)

    def _counting(self, counter: Any, label: str) -> Any:
        def count(sender: Any, **_: Any) -> None:
            counter.labels(sender.name, label).inc()

        return count

    def _on_begun(self, sender: Any, attempt: int, **_: Any) -> None:
        self._decisions.labels(sender.name, "takeover" if attempt > 1 else "run").inc()
        self._held.set(len(heartbeat.held()))

    def _on_end(self, **_: Any) -> None:
        """Of the task, which is after the end of its lease."""
        self._held.set(len(heartbeat.held()))

    def _on_taken_over(self, sender: Any, orphaned_seconds: float, **_: Any) -> None:
        self._takeover.labels(sender.name).observe(orphaned_seconds)

    def _on_begin_replied(self, sender: Any, case: str, seconds: float, **_: Any) -> None:
        self._begin.labels(sender.name, case).observe(seconds)


class _Sums:
    """Collects what all processes of the pool have counted, dead ones included."""

    def __init__(self, directory: str) -> None:
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        self._directory = directory
        self._collector = MultiProcessCollector(CollectorRegistry(), directory)

    def collect(self) -> Iterator[Metric]:
        """The metrics; a process that was killed holds no leases any more."""
        from prometheus_client.multiprocess import mark_process_dead

        for file in Path(self._directory).glob("gauge_live*.db"):
            match = _LIVE.fullmatch(file.name)
            if match and not _lives(int(match[1])):
                mark_process_dead(int(match[1]), self._directory)
        yield from self._collector.collect()


def start(setting: Any) -> None:
    """Count, and serve as soon as the worker is ready.

    Raises:
        SettingsError: if the setting is wrong.
        ImportError: if prometheus_client is missing.
    """
    host, port = address(setting)
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        directory = os.environ[DIRECTORY_VARIABLE] = tempfile.mkdtemp(prefix="idempotency-metrics-")
        worker_shutdown.connect(_removing(directory, os.getpid()), weak=False)
    _use_files()
    Metrics().connect()

    def serve(**_: Any) -> None:
        _serve(host, port, _Sums(directory))

    worker_ready.connect(serve, weak=False)


def _use_files() -> None:
    """prometheus_client decides at its import, and Flower's plugin has imported it already."""
    already = "prometheus_client" in sys.modules
    from prometheus_client import values

    if already:
        values.ValueClass = values.get_value_class()


def _serve(host: str, port: int, sums: _Sums) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(sums)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        logger.error("The idempotency metrics are not served at %s:%d: %s", host, port, error)
        return
    # A process of the pool that is started later must not keep the port.
    worker_process_init.connect(lambda **_: server.socket.close(), weak=False)
    logger.info("Idempotency metrics: http://%s:%d/metrics", host, port)


def _removing(directory: str, pid: int) -> Any:
    def remove(**_: Any) -> None:
        if os.getpid() == pid:
            shutil.rmtree(directory, ignore_errors=True)

    return remove


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
