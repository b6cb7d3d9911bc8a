"""Checks for settings that weaken the guarantees: what is wrong, why, and what to set.

A check is a function that yields findings. The command ``doctor`` runs all checks; a worker runs
those of the server and the broker when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.doctor import broker, databases, key_changes, server, tasks, versions
from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.doctor.key_snapshot import Snapshot
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.inspection.record_reader import RecordReader
from celery_idempotent.store.record_store import RecordStore

__all__ = ["Finding", "Severity", "check_at_start", "examine"]

#: Seconds that a starting worker waits for the server's reply.
START_TIMEOUT = 2.0


def examine(
    app: Celery,
    counted: Mapping[str, Mapping[str, int]] | None = None,
    before: Mapping[str, Snapshot] | None = None,
) -> list[Finding]:
    """Returns all findings, the most severe first.

    Args:
        counted: what workers have counted, by task.
        before: the keys of another version of the code, by task, to compare this one with.
    """
    findings = [*versions.check(), *broker.check(app), *tasks.check(app), *_check_servers(app)]
    findings += [*databases.check(app), *tasks.check_counts(counted or {})]
    if before is not None:
        findings += key_changes.check(app, before)
    return sorted(findings, key=lambda finding: finding.severity, reverse=True)


def check_at_start(app: Celery) -> Iterator[Finding]:
    """Yields what a worker warns of before it takes its first message.

    An unreachable server is left out, since the worker logs it separately.
    """
    yield from broker.check_visibility_timeout(app)
    for finding in _check_servers(app, START_TIMEOUT):
        if finding.severity >= Severity.WARNING and finding.name != server.UNREACHABLE:
            yield finding


def _check_servers(app: Celery, timeout: float = 5.0) -> Iterable[Finding]:
    # Stores that differ in their prefix alone yield the same findings: keep each once.
    stores = app_tasks.stores(app_tasks.enabled(app))
    return dict.fromkeys(finding for store in stores for finding in _check_server(store, timeout))


def _check_server(store: RecordStore, timeout: float) -> list[Finding]:
    subject = str(store.config)
    try:
        with RecordReader.open(store, timeout) as reader:
            info = reader.server_info()
    except IdempotencyError as error:
        return [server.unreachable(subject, error)]
    return list(server.check(info, subject, store.config.wait_replicas))
