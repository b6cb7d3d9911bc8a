"""Checks for what weakens the guarantees: what is wrong, why, and what to set.

A check is a function that yields findings. ``doctor`` reports those of the configuration, and
``health`` those of running workers and servers; a starting worker checks only the versions, tasks
without protection, the redelivery, the pool and the servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from celery import Celery

from celery_idempotent import sql
from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.printable import did_you_mean
from celery_idempotent.core.store.record_store import RecordStore
from celery_idempotent.errors import IdempotencyError, SettingsError
from celery_idempotent.operations.doctor import broker, key_snapshot, server, tasks, versions
from celery_idempotent.operations.doctor.finding import (
    CONNECTIONS,
    HEALTH,
    NAMES,
    Finding,
    Severity,
    joined,
)
from celery_idempotent.operations.doctor.key_snapshot import Snapshot
from celery_idempotent.operations.records.reader import RecordReader

__all__ = [
    "Finding",
    "Severity",
    "check_all",
    "check_at_start",
    "check_configuration",
    "check_health",
]

#: Seconds that a starting worker waits for the server's reply.
START_TIMEOUT = 2.0
#: Seconds after which an expired row should be gone, since the cron job runs daily.
PURGE_AFTER = 2 * 86400.0


def check_configuration(
    app: Celery,
    before: Mapping[str, Snapshot] | None = None,
    *,
    offline: bool = False,
    ignore: Sequence[str] = (),
) -> list[Finding]:
    """Returns the findings of ``doctor`` that are not ignored, most severe first.

    Findings that differ only in their subject are merged.

    Args:
        before: the keys of another version of the code, by task, for comparison.
        offline: whether to connect to no server.
        ignore: as for :func:`ignored`.
    """
    findings = [] if offline else _check_connections(app)
    findings += _check_settings(app)
    if before is not None:
        findings += key_snapshot.check(app, before)
    return _reported(app, (each for each in findings if each.name not in HEALTH), ignore)


def check_health(
    app: Celery,
    counted: Mapping[str, Mapping[str, int]],
    leases: Iterable[Mapping[str, Any]],
    silence: str = "",
    *,
    ignore: Sequence[str] = (),
) -> list[Finding]:
    """Returns the findings of ``health`` that are not ignored, most severe first.

    Args:
        counted: the workers' counters, by task.
        leases: the leases that workers report.
        silence: why no worker has replied; empty if one has, or none was asked.
        ignore: as for :func:`ignored`.
    """
    findings = [*_check_connections(app), *_check_workers(counted, leases)]
    findings += tasks.check_silence(silence)
    return _reported(app, (each for each in findings if each.name in HEALTH | CONNECTIONS), ignore)


def check_all(
    app: Celery, counted: Mapping[str, Mapping[str, int]], leases: Iterable[Mapping[str, Any]]
) -> list[Finding]:
    """Returns the findings of ``doctor`` and ``health``, current faults before mere settings."""
    findings = [*_check_connections(app), *_check_workers(counted, leases), *_check_settings(app)]
    return _reported(app, findings)


def _check_connections(app: Celery) -> list[Finding]:
    return [*_check_servers(app), *broker.check_connection(app), *_check_databases(app)]


def _check_workers(
    counted: Mapping[str, Mapping[str, int]], leases: Iterable[Mapping[str, Any]]
) -> list[Finding]:
    return [*tasks.check_leases(leases), *tasks.check_counts(counted)]


def _check_settings(app: Celery) -> list[Finding]:
    return [*versions.check(), *broker.check(app), *tasks.check(app)]


def ignored(app: Celery, names: Sequence[str] = ()) -> list[str]:
    """Returns ``idempotency_doctor_ignore`` and `names`: items like ``name`` or ``name:subject``.

    Raises:
        SettingsError: if the setting is not a list of text, or a finding does not exist.
    """
    setting = app.conf.get("idempotency_doctor_ignore") or ()
    if isinstance(setting, str) or not all(isinstance(name, str) for name in setting):
        raise SettingsError(
            "idempotency_doctor_ignore must be a list of findings, such as ['acks-late', "
            "'shadow:shop.charge']"
        )
    for item in (*setting, *names):
        name = item.partition(":")[0]
        if name not in NAMES:
            source = "idempotency_doctor_ignore" if item in setting else "--ignore"
            raise SettingsError(
                f"{source}: no finding is named {name!r}{did_you_mean(name, NAMES)}"
            )
    return [*setting, *names]


def _reported(
    app: Celery, findings: Iterable[Finding], ignore: Sequence[str] = ()
) -> list[Finding]:
    names = {*ignored(app, ignore)}
    return joined(
        each for each in findings if not {each.name, f"{each.name}:{each.subject}"} & names
    )


def check_at_start(app: Celery) -> list[Finding]:
    """Returns what a worker logs before its first message."""
    findings = [*versions.check(), *tasks.check_bases(app), *broker.check_visibility_timeout(app)]
    findings += tasks.check_start_method()
    findings += broker.check_redelivery(app)
    findings += _check_servers(app, START_TIMEOUT)
    return [finding for finding in _reported(app, findings) if finding.severity >= Severity.WARNING]


def _check_servers(app: Celery, timeout: float = 5.0) -> Iterable[Finding]:
    # All stores, even two on one server: each may connect as another user. Equal findings are
    # reported once.
    tasks = app_tasks.enabled(app)
    stores = dict.fromkeys(task.idempotency_configuration.executor.store for task in tasks)
    return dict.fromkeys(finding for store in stores for finding in _check_server(store, timeout))


def _check_server(store: RecordStore, timeout: float) -> Iterator[Finding]:
    infos: list[tuple[str, dict[str, Any] | IdempotencyError]]
    try:
        with RecordReader.open(store, timeout) as reader:
            infos = [*reader.server_infos()]
    except IdempotencyError as error:
        infos = [("", error)]
    for node, info in infos:
        subject = f"{store.config}, node {node}" if node else str(store.config)
        if isinstance(info, IdempotencyError):
            yield Finding(
                "store-unreachable", Severity.ERROR, subject,
                str(info), "idempotency_redis_url, or start the server",
                "idempotency_on_store_error applies to every message",
            )  # fmt: skip
        else:
            yield from server.check(info, subject, store.config.wait_replicas)


def _check_databases(app: Celery) -> Iterator[Finding]:
    for database in sql.databases(app_tasks.enabled(app)):
        try:
            overdue = database.purge_is_overdue(PURGE_AFTER)
        except IdempotencyError as error:
            yield Finding(
                "database-unreachable", Severity.ERROR, str(database),
                str(error), "the database, its URL and its table",
                "tasks with transactions in it cannot run",
            )  # fmt: skip
            continue
        if overdue:
            yield Finding(
                "purge-overdue", Severity.WARNING, database.engine.name,
                f"outcomes have been expired for more than {PURGE_AFTER / 86400:g} days",
                "a cron job that runs 'celery idempotency purge' every day",
                "the table of outcomes grows without end",
            )  # fmt: skip
