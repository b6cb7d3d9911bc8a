"""What a task's own settings make of the promise."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.key.canonical import has_canonical_bytes


def check(app: Celery) -> Iterator[Finding]:
    """All findings about the app's tasks."""
    beaten = {entry.get("task") for entry in (app.conf.beat_schedule or {}).values()}
    if app.conf.task_always_eager:
        yield Finding(
            "eager", Severity.WARNING, "worker",
            "task_always_eager is on", "task_always_eager = False",
            "tasks run where they are called: nothing delivers them again after a crash",
        )  # fmt: skip
    for task in app_tasks.tasks(app):
        if not task.idempotency_configuration.settings.enabled:
            yield _disabled(task)
            continue
        for one in (_delivery, _outcome, _store_error, _key_rule):
            yield from one(task)
        if task.name in beaten:
            yield from _periodic(task)


def _disabled(task: IdempotentTaskLike) -> Finding:
    return Finding(
        "disabled", Severity.WARNING, task.name,
        "idempotency_enabled is off", "idempotency_enabled = True",
        "every duplicate runs",
    )  # fmt: skip


def _delivery(task: IdempotentTaskLike) -> Iterator[Finding]:
    if not task.acks_late:
        yield Finding(
            "acks-late", Severity.WARNING, task.name,
            "acks_late is off", "acks_late = True",
            "a message is acknowledged before it runs, so a crash loses the task",
        )  # fmt: skip
    elif not task.reject_on_worker_lost:
        yield Finding(
            "reject-on-worker-lost", Severity.WARNING, task.name,
            "reject_on_worker_lost is off", "reject_on_worker_lost = True",
            "a task whose process is killed is acknowledged as failed, and does not run again",
        )  # fmt: skip


def _outcome(task: IdempotentTaskLike) -> Iterator[Finding]:
    settings = task.idempotency_configuration.settings
    if not settings.store_result:
        yield Finding(
            "store-result", Severity.NOTE, task.name,
            "idempotency_store_result is off", "idempotency_store_result = True",
            "a duplicate that wants the result gets ResultNotStoredError",
        )  # fmt: skip
    if task.ignore_result:
        yield Finding(
            "ignore-result", Severity.NOTE, task.name,
            "ignore_result is on", "ignore_result = False",
            "the record keeps the result, but no caller, first or duplicate, can wait for it",
        )  # fmt: skip


def _store_error(task: IdempotentTaskLike) -> Iterator[Finding]:
    if task.idempotency_configuration.settings.on_store_error == "run":
        yield Finding(
            "fail-open", Severity.WARNING, task.name,
            "idempotency_on_store_error is 'run'", "idempotency_on_store_error = 'retry'",
            "while Redis is away, duplicates run unprotected",
        )  # fmt: skip


def _periodic(task: IdempotentTaskLike) -> Iterator[Finding]:
    settings = task.idempotency_configuration.settings
    if settings.key is None:
        yield Finding(
            "periodic-key", Severity.WARNING, task.name,
            "beat sends it, and its key is made of its arguments, which are the same each time",
            "idempotency_key = TASK_ID",
            f"after one run the next ones are replays, for {settings.result_ttl:g} s",
        )  # fmt: skip


def _key_rule(task: IdempotentTaskLike) -> Iterator[Finding]:
    """Without a rule every argument is part of the key, so each must have a canonical form."""
    configured = task.idempotency_configuration
    if configured.settings.key is not None or getattr(task, "pydantic", False):
        return
    parameters = configured.rule.signature.parameters.values()
    hints = _hints(task)
    for parameter in parameters:
        kind = hints.get(parameter.name)
        default = parameter.default
        odd = isinstance(kind, type) and not has_canonical_bytes(kind)
        if (
            not odd
            and default is not inspect.Parameter.empty
            and not has_canonical_bytes(type(default))
        ):
            odd, kind = True, type(default)
        if odd and isinstance(kind, type):
            yield Finding(
                "not-canonical", Severity.ERROR, task.name,
                f"argument {parameter.name!r} is of type {kind.__qualname__}, which has no "
                "canonical form, and the task has no key rule",
                "idempotency_key: a template or names that leave it out, or a plain type",
                "a call with such an argument fails with KeyRuleError",
            )  # fmt: skip


def _hints(task: IdempotentTaskLike) -> dict[str, Any]:
    try:
        return typing.get_type_hints(getattr(task, "run", None))
    except Exception:  # a name that exists for the type checker alone
        return {}
