"""Everything that makes the promise weaker, each with the setting to change and why.

A check is a function from what it looks at to findings; a finding is a value. The command
``doctor`` runs all of them, a worker at its start those that look at the server and the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.doctor import broker, server, tasks, versions
from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.store.record_store import RecordStore

__all__ = ["Finding", "Severity", "check_at_start", "examine"]

#: Seconds that a worker waits at its start for the server to speak of itself.
PATIENCE_AT_START = 2.0


def examine(app: Celery) -> list[Finding]:
    """All findings, the gravest first."""
    found = [*versions.check(), *broker.check(app), *tasks.check(app), *_of_servers(app)]
    return sorted(found, key=lambda finding: finding.severity, reverse=True)


def check_at_start(app: Celery) -> Iterator[Finding]:
    """What a worker warns of before it takes its first message.

    Of a server that does not answer it says nothing: that is another line.
    """
    yield from broker.visibility(app)
    for finding in _of_servers(app, PATIENCE_AT_START):
        if finding.severity >= Severity.WARNING and finding.name != server.AWAY:
            yield finding


def _of_servers(app: Celery, timeout: float = 5.0) -> Iterable[Finding]:
    """Each once: several stores on one server, by other prefixes, find the same."""
    stores = app_tasks.stores(app_tasks.enabled(app))
    return dict.fromkeys(finding for store in stores for finding in _of_server(store, timeout))


def _of_server(store: RecordStore, timeout: float) -> list[Finding]:
    try:
        with store.open_reader(timeout) as open_reader:
            server_info = open_reader.server_info()
    except IdempotencyError as error:
        return [server.away(str(store.config), error)]
    return list(server.check(server_info, str(store.config), store.config.wait_replicas))
