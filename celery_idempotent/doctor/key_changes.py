"""Compares the keys of this code with those of another version, from its snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.doctor import key_snapshot
from celery_idempotent.doctor.finding import Finding, Severity
from celery_idempotent.doctor.key_snapshot import Snapshot
from celery_idempotent.errors import KeyRuleError


def check(app: Celery, before: Mapping[str, Snapshot]) -> Iterator[Finding]:
    """Yields what changes for each task between the snapshots `before` and this code."""
    tasks = {task.name: task for task in app_tasks.tasks(app)}
    for name in sorted({*before, *tasks}):
        if name not in tasks:
            yield _removed(name)
        elif not tasks[name].idempotency_configuration.settings.enabled:
            continue  # the finding `disabled` covers it
        elif name not in before:
            yield _added(name)
        else:
            yield from _check_task(tasks[name], before[name])


def _check_task(task: IdempotentTaskLike, before: Snapshot) -> Iterator[Finding]:
    now = key_snapshot.of_task(task)
    if not (before.samples and now.samples):
        yield _unknown(task.name, before, now)
        return
    changes = _changes(task, before)
    if before.prefix != now.prefix:
        changes = ["keys"]
    if "keys" in changes:
        yield _keys_changed(task, _differences(before, now))
    elif "refused" in changes:
        yield _calls_refused(task.name, _differences(before, now))
    elif "fingerprints" in changes:
        yield _fingerprints_changed(task, _differences(before, now))
    elif defaults := _changed_defaults(before.parameters, now.parameters):
        yield _defaults_changed(task.name, defaults)


def _changes(task: IdempotentTaskLike, before: Snapshot) -> Collection[str]:
    """Returns what differs for the calls of the snapshot: keys, fingerprints, refused."""
    changes = set()
    for call, key in before.samples:
        try:
            now = key_snapshot.key_of(task.idempotency_configuration.rule, call)
        except (KeyRuleError, TypeError):
            changes.add("refused")
        else:
            if now.digest != key.digest:
                changes.add("keys")
            elif now.fingerprint != key.fingerprint:
                changes.add("fingerprints")
    return changes


def _changed_defaults(
    before: Mapping[str, str | None], now: Mapping[str, str | None]
) -> Sequence[str]:
    return [
        name
        for name, default in before.items()
        if default and now.get(name) and now[name] != default
    ]


def _differences(before: Snapshot, now: Snapshot) -> str:
    """Describes what has changed in the code, as far as a snapshot shows it."""
    parts = []
    for label, old, new in (
        ("rule", before.rule, now.rule),
        ("prefix", before.prefix, now.prefix),
        ("parameters", ", ".join(before.parameters), ", ".join(now.parameters)),
    ):
        if old != new:
            parts.append(f"{label}: {old or 'none'} → {new or 'none'}")
    if defaults := _changed_defaults(before.parameters, now.parameters):
        parts.append(f"defaults: {', '.join(defaults)}")
    return "; ".join(parts) or "rule, names of parameters and prefix are the same"


def _retention(task: IdempotentTaskLike) -> str:
    return f"{task.idempotency_configuration.settings.result_ttl:g} s"


def _keys_changed(task: IdempotentTaskLike, differences: str) -> Finding:
    return Finding(
        "keys-changed", Severity.WARNING, task.name,
        f"its keys differ from those of the snapshot ({differences})",
        "the rule and parameters of before; or stop all workers of one version before the first of "
        "the other starts, while no duplicate of an earlier call can arrive",
        "while workers of both versions run, a call and its duplicate may both run; after that, "
        "so does a duplicate of a call from before, until its outcome would have expired "
        f"({_retention(task)})",
    )  # fmt: skip


def _fingerprints_changed(task: IdempotentTaskLike, differences: str) -> Finding:
    return Finding(
        "fingerprints-changed", Severity.WARNING, task.name,
        f"its keys are those of the snapshot, its fingerprints are not ({differences})",
        "the parameters' names of before; a new parameter with a default changes nothing",
        "a duplicate of a call from the other version is refused with KeyReusedError, until the "
        f"outcome has expired ({_retention(task)})",
    )  # fmt: skip


def _calls_refused(name: str, differences: str) -> Finding:
    return Finding(
        "calls-refused", Severity.WARNING, name,
        f"calls that the snapshot's version accepts do not fit this code ({differences})",
        "a default for each new parameter, and a rule that derives a key from the old calls, too",
        "messages that are in the queue, or that publishers of the other version send, fail",
    )  # fmt: skip


def _defaults_changed(name: str, defaults: Sequence[str]) -> Finding:
    return Finding(
        "defaults-changed", Severity.WARNING, name,
        f"the default of {', '.join(defaults)} has changed, and the keys of calls without it have "
        "not",
        "the default of before, or another name for the parameter",
        "a call that leaves it out means something else, and gets the outcome of a call from "
        "before; one that passes the old default has a new key",
    )  # fmt: skip


def _unknown(name: str, before: Snapshot, now: Snapshot) -> Finding:
    return Finding(
        "keys-unknown", Severity.NOTE, name,
        "its keys cannot be compared, because its rule raises an error for the sample calls "
        f"({_differences(before, now)})",
        "type annotations from which sample arguments can be made",
        "a change of its keys goes unnoticed",
    )  # fmt: skip


def _removed(name: str) -> Finding:
    return Finding(
        "task-removed", Severity.WARNING, name,
        "the snapshot has this task, and this code has no idempotent task of that name",
        "@app.task(name=…) with the old name, if the task was renamed or moved",
        "workers with this code discard its messages; under another name its keys are new, so that "
        "duplicates of calls from before run again",
    )  # fmt: skip


def _added(name: str) -> Finding:
    return Finding(
        "task-added", Severity.NOTE, name,
        "this code has the task, and the snapshot does not",
        "nothing, if it is new; if it was renamed, @app.task(name=…) with the old name",
        "until they are updated, workers of the other version discard its messages, or run them "
        "without a key",
    )  # fmt: skip
