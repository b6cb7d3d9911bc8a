"""Checks the tasks' settings, and the workers' counts and leases."""

from __future__ import annotations

import inspect
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import billiard
from celery import Celery

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.events.table import REFUSED_FOR, WOULD_REFUSE_FOR
from celery_idempotent.core.key.canonical import has_canonical_bytes
from celery_idempotent.core.printable import plural
from celery_idempotent.operations.doctor.finding import Check, Finding, Severity, applying

#: Heartbeat states of leases under which another execution may begin.
EXPIRED = ("expired", "lost")


def check(app: Celery) -> Iterator[Finding]:
    """Yields all findings about the app's tasks."""
    yield from applying(
        "worker",
        Check(app.conf.task_always_eager, "eager", Severity.WARNING,
            "task_always_eager is on", "task_always_eager = False",
            "tasks run in the process that calls them: after a crash nothing redelivers them"),
        Check(app.conf.worker_deduplicate_successful_tasks, "successful-tasks", Severity.WARNING,
            "worker_deduplicate_successful_tasks is on",
            "worker_deduplicate_successful_tasks = False",
            "a redelivered message is acknowledged before the library sees it: a callback or a "
            "chord that its dead worker did not send is lost"),
    )  # fmt: skip
    yield from check_bases(app)
    yield from check_start_method()
    periodic = {entry.get("task") for entry in (app.conf.beat_schedule or {}).values()}
    for task in app_tasks.tasks(app):
        if task.idempotency_configuration.is_protected:
            for option in task.idempotency_configuration.settings.option_classes:
                for name, severity, *words in option.findings(task):
                    yield Finding(name, Severity[severity.upper()], task.name, *words)
            yield from _check_options(task, is_periodic=task.name in periodic)
            yield from _check_canonical(task)
        else:
            yield Finding(
                "disabled", Severity.WARNING, task.name,
                "idempotency_enabled is off", "idempotency_enabled = True",
                "every duplicate runs",
            )  # fmt: skip


def check_start_method() -> Iterator[Finding]:
    """Yields a finding for a start method of processes with which Celery's pool works badly."""
    # Celery's main process distinguishes the pipes of its pool by file descriptors, and a process
    # replies with its own. Only forked and spawned processes have the same numbers.
    yield from applying(
        "worker",
        Check(billiard.get_start_method(allow_none=True) == "forkserver",
            "start-method", Severity.ERROR,
            "billiard starts the processes of the pool by 'forkserver'",
            "worker_pool_start_method = 'spawn' (Celery 5.7 and later), or no set_start_method()",
            "Celery's prefork pool gives a process one message, and no more: other messages wait"),
    )  # fmt: skip


def check_bases(app: Celery) -> Iterator[Finding]:
    """Yields a finding for each plain task that has options of this package."""
    for name, problem in app_tasks.plain_with_options(app):
        yield Finding(
            "no-base", Severity.ERROR, name,
            problem, app_tasks.ADD_BASE, "it is a plain task: every duplicate runs",
        )  # fmt: skip


def _check_options(task: IdempotentTaskLike, *, is_periodic: bool) -> Iterator[Finding]:
    configuration = task.idempotency_configuration
    settings, obstacle = configuration.settings, configuration.fusion_obstacle
    return applying(
        task.name,
        Check(not task.acks_late, "acks-late", Severity.WARNING,
            "acks_late is off", "acks_late = True",
            "messages are acknowledged before they run, so a crash loses the task"),
        Check(task.acks_late and not task.reject_on_worker_lost,
            "reject-on-worker-lost", Severity.WARNING,
            "reject_on_worker_lost is off", "reject_on_worker_lost = True",
            "a task whose process is killed is acknowledged as failed, and does not run again"),
        Check(not (configuration.in_shadow or settings.store_result), "store-result", Severity.NOTE,
            "idempotency_store_result is off",
            "idempotency_store_result = True, if duplicates need the result",
            "duplicates that need the result get ResultNotStoredError"),
        Check(task.ignore_result, "ignore-result", Severity.NOTE,
            "ignore_result is on", "ignore_result = False, if a caller needs the result",
            "no caller, first or duplicate, can wait for the result"),
        Check(obstacle and not (task.ignore_result or configuration.in_shadow),
            "fused-completion", Severity.NOTE,
            f"Celery writes its results separately: {obstacle}",
            "none is needed; fused completion needs Celery's RedisBackend, with the server, "
            "database and user of the records",
            "each run takes two round trips more than with fused completion"),
        Check(settings.on_store_error == "run", "fail-open", Severity.WARNING,
            "idempotency_on_store_error is 'run'", "idempotency_on_store_error = 'retry'",
            "while Redis is unavailable, duplicates run"),
        Check("idempotency_key" in configuration.rule.signature.parameters,
            "key-argument", Severity.NOTE,
            "it has a parameter named idempotency_key", "another name for the parameter",
            "delay(idempotency_key=…) passes an argument, and not the key of the call"),
        Check(is_periodic and configuration.rule.source is None and not settings.runs_again,
            "periodic-key", Severity.WARNING,
            "it is in beat_schedule, and its key consists of its arguments, the same each time",
            "idempotency_key = TASK_ID",
            "after one run the next ones are replays, until its outcome expires"),
    )  # fmt: skip


def _check_canonical(task: IdempotentTaskLike) -> Iterator[Finding]:
    """Yields a finding per argument without a canonical form, if there is no key rule."""
    configuration = task.idempotency_configuration
    if configuration.rule.source is not None or hasattr(task.run, "dump_arguments"):
        return
    hints = type_hints(task)
    for parameter in configuration.rule.signature.parameters.values():
        types = [hints.get(parameter.name)]
        if parameter.default is not inspect.Parameter.empty:
            types.append(type(parameter.default))
        wrong = next((t for t in types if isinstance(t, type) and not has_canonical_bytes(t)), None)
        if wrong is not None:
            yield Finding(
                "not-canonical", Severity.ERROR, task.name,
                f"argument {parameter.name!r} is of type {wrong.__qualname__}, which has no "
                "canonical form, and the task has no key rule",
                "idempotency_key: a template or names that leave it out, or a plain type",
                "calls with such an argument fail with KeyRuleError",
            )  # fmt: skip


def check_counts(counts: Mapping[str, Mapping[str, int]]) -> Iterator[Finding]:
    """Yields all findings about the workers' counters since their start.

    Args:
        counts: by task and name, one of `events.table.COUNTED`.
    """
    names = [WOULD_REFUSE_FOR + "key_rule"]
    names += [REFUSED_FOR + reason for reason in ("key_rule", "reused", "poisoned")]
    names.append("bypassed")
    since, failed = "since the workers started", "these calls have failed, and did not run"
    for task, counter in counts.items():
        would, rule, reused, poisoned, bypassed = (counter.get(name, 0) for name in names)
        yield from applying(
            task,
            Check(rule or would, "rule-raised", Severity.ERROR if rule else Severity.WARNING,
                f"no key could be derived for {rule or would} of its calls {since}",
                "idempotency_key, or the publisher of these calls; the log has each KeyRuleError "
                "with its cause",
                failed if rule else "without shadow, these calls will fail"),
            Check(reused, "key-reused", Severity.WARNING,
                f"{reused} of its calls had the key of an earlier one and other arguments, {since}",
                "the client that uses a key twice, or idempotency_key if it leaves out what "
                "distinguishes calls",
                failed),
            Check(poisoned, "poisoned", Severity.ERROR,
                f"{poisoned} of its calls had a key whose executions have died, {since}",
                "what kills its processes: memory, native code, a time limit; then run the call "
                "again",
                failed),
            Check(bypassed, "bypassed", Severity.ERROR,
                f"{bypassed} of its messages have succeeded without a decision, {since}",
                "the worker's pool, or the library that runs its bodies outside the task's "
                "__call__",
                "these calls ran unprotected: their duplicates run"),
        )  # fmt: skip


def check_silence(reason: str) -> Iterator[Finding]:
    """Yields a finding if no worker has replied, for this reason."""
    yield from applying(
        "worker",
        Check(reason, "no-reply", Severity.WARNING,
            reason, "start the workers, or a longer --timeout",
            "messages may wait; the workers' counters and leases are not checked"),
    )  # fmt: skip


def check_leases(leases: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields a finding for each task with executions under an expired lease.

    Args:
        leases: as the workers report them.
    """
    workers: dict[str, list[str]] = defaultdict(list)
    for lease in leases:
        if lease["heartbeat"] in EXPIRED:
            workers[lease["task"]].append(lease.get("worker", f"process {lease['pid']}"))
    for task, where in workers.items():
        yield Finding(
            "lease-expired", Severity.ERROR, task,
            f"{plural(len(where), 'execution')} under an expired lease: {', '.join(where[:5])}",
            "end the frozen process, or let it run and reach Redis again",
            "another execution of the same call may begin; the outcome of this one is then refused",
        )  # fmt: skip


def type_hints(task: IdempotentTaskLike) -> dict[str, Any]:
    """Returns the types of the task's parameters by name, as far as they can be resolved."""
    try:
        return typing.get_type_hints(getattr(task, "run", None))
    except Exception:  # a name imported only for type checking
        return {}
