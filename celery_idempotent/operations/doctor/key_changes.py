"""Compares the keys of this code with another version's snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from celery import Celery

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.operations.doctor import key_snapshot
from celery_idempotent.operations.doctor.finding import Check, Finding, Severity, applying
from celery_idempotent.operations.doctor.key_snapshot import Sample, Snapshot


def check(app: Celery, before: Mapping[str, Snapshot]) -> Iterator[Finding]:
    """Yields the changes of each task from the snapshots `before` to this code."""
    tasks = {task.name: task for task in app_tasks.tasks(app)}
    for name, snapshot in sorted(before.items()):
        if name not in tasks:
            yield Finding(
                "task-removed", Severity.WARNING, name,
                "the snapshot has this task, and this code has no idempotent task of that name",
                "@app.task(name=…) with the old name, if the task was renamed or moved",
                "workers with this code discard its messages, or run them without a key; "
                "under another name its keys are new: duplicates of earlier calls run again",
            )  # fmt: skip
        elif tasks[name].idempotency_configuration.is_protected:
            yield from _check_task(tasks[name], snapshot)


def _check_task(task: IdempotentTaskLike, before: Snapshot) -> Iterator[Finding]:
    """Yields the most important change of the task."""
    now = key_snapshot.of_task(task)
    is_known = bool(before.samples and now.samples)
    changes = _changes(task, before) if is_known else ()
    differences = _differences(before, now)
    retention = f"{task.idempotency_configuration.settings.result_ttl:g} s"
    found = applying(
        task.name,
        Check(not is_known, "keys-unknown", Severity.NOTE,
            "its keys cannot be compared, because its rule raises an error for the sample calls "
            f"({differences})",
            "type annotations from which sample arguments can be made",
            "a change of its keys goes unnoticed"),
        Check("keys" in changes or before.prefix != now.prefix, "keys-changed", Severity.WARNING,
            f"its keys differ from those of the snapshot ({differences})",
            "the previous rule and parameters; or, at a time when no duplicate of an earlier call "
            "can arrive, stop all workers of one version before the first of the other starts",
            "while workers of both versions run, a call and its duplicate may both run; afterwards "
            "a duplicate of an earlier call runs again, until its outcome would have expired "
            f"({retention})"),
        Check("refused" in changes, "calls-refused", Severity.WARNING,
            f"calls that the snapshot's version accepts do not fit this code ({differences})",
            "a default for each new parameter, and a rule that also derives a key from "
            "the old calls",
            "messages that are in the queue, or that publishers of the other version send, fail"),
        Check("fingerprints" in changes, "fingerprints-changed", Severity.WARNING,
            f"its keys are those of the snapshot, but its fingerprints are not ({differences})",
            "the previous names of the parameters; a new parameter with a default changes nothing",
            "a duplicate of a call from the other version is refused with KeyReusedError, until "
            f"the outcome has expired ({retention})"),
    )  # fmt: skip
    return islice(found, 1)


def _changes(task: IdempotentTaskLike, before: Snapshot) -> Collection[str]:
    """Returns the changes for the snapshot's calls: keys, fingerprints, refused."""
    changes = set()
    for sample in before.samples:
        try:
            now = Sample.of(task.idempotency_configuration.rule, sample.args, sample.kwargs)
        except (KeyRuleError, TypeError):
            changes.add("refused")
        else:
            if now.digest != sample.digest:
                changes.add("keys")
            elif now.fingerprint != sample.fingerprint:
                changes.add("fingerprints")
    return changes


def _differences(before: Snapshot, now: Snapshot) -> str:
    """Describes the code changes that a snapshot shows."""
    parts = []
    for label, old, new in (
        ("rule", before.rule, now.rule),
        ("prefix", before.prefix, now.prefix),
        ("parameters", ", ".join(before.parameters), ", ".join(now.parameters)),
    ):
        if old != new:
            parts.append(f"{label}: {old or 'none'} → {new or 'none'}")
    return "; ".join(parts) or "rule, names of parameters and prefix are the same"
