"""Finds what an operator names, by key, by task id, or by task and arguments: record and row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import click

from celery_idempotent.cli.command import OwnKey, parse_arguments
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.key.key import Key
from celery_idempotent.monitoring.sql_outcome import SqlOutcome, find_sql_outcome, sql_outcome
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_query import RecordFilter, RecordView, read_view
from celery_idempotent.store.inspection.task_lookup import find_task
from celery_idempotent.store.reference import Reference

RECORD_HELP = """\b
RECORD is one of:
  a key                      shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ (with or without the prefix)
                             shop.charge:~XUu_BHoPn0pnw_7WY52VtA (that a call brought)
  a task id                  5e1d…  (of a duplicate, or of the task that was executed:
                             this scans all records)
  a task and the call's arguments, as JSON
                             shop.charge '[42]' '{"amount": 999}'
  a task and the key that the call brings
                             shop.charge --key req-7f3a
                             shop.charge --key acme --key req-7f3a (a tuple)"""


def make_filter(state: str | None, task: str | None, older_than: timedelta | None) -> RecordFilter:
    """Returns the filter that the options --state, --task and --older-than describe."""
    return RecordFilter(None if state is None else State(state.upper()), task, older_than)


@dataclass(frozen=True, slots=True)
class Target:
    """A key that an operator has named."""

    key: Key
    #: None if Redis has no record of it; there is a row in the database of its task, then.
    view: RecordView | None
    #: None if it is not a task of this app.
    task: IdempotentTaskLike | None

    def outcome(self) -> SqlOutcome | None:
        """Returns the row of the key; None if there is none.

        Raises:
            StoreUnavailableError: if the database is unavailable.
        """
        return None if self.task is None else sql_outcome(self.task, self.key)


def resolve_records(
    tasks: Sequence[IdempotentTaskLike], names: tuple[str, ...], own_key: OwnKey
) -> list[Target]:
    """Returns the records, or rows without a record, that `names` refer to.

    Raises:
        ClickException: if there is neither.
        UsageError: if `names` is neither a key, a task id nor a task with its arguments.
    """
    task = next((task for task in tasks if task.name == names[0]), None)
    if task is not None:
        key = _key_of_call(task, names[1:], own_key)
        view = read_view(task.idempotency_configuration.executor.store, key)
        target = Target(key, view, task)
        if view is None and target.outcome() is None:
            raise click.ClickException(f"{key} is absent: a call with these arguments would run")
        return [target]
    if own_key is not None:
        raise click.UsageError("--key needs a task: shop.charge --key req-7f3a")
    return [_find(tasks, name) for name in names]


def target_of(tasks: Sequence[IdempotentTaskLike], view: RecordView) -> Target:
    """Returns the target whose record is `view`."""
    task = next((task for task in tasks if task.name == view.key.task), None)
    return Target(view.key, view, task)


def _key_of_call(task: IdempotentTaskLike, texts: tuple[str, ...], own_key: OwnKey) -> Key:
    args, kwargs = parse_arguments(texts)
    if own_key is not None:
        kwargs["idempotency_key"] = own_key
    try:
        return task.idempotency_key_of(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"the arguments do not fit {task.name}: {error}") from None


def _find(tasks: Sequence[IdempotentTaskLike], name: str) -> Target:
    # A store whose prefix is also a task's name may read a key differently from the task's own
    # store: try the stores of the task that `name` begins with first.
    for store in app_tasks.stores(sorted(tasks, key=lambda task: f"{task.name}:" not in name)):
        with store.open_reader() as reader:
            key = reader.key_of(name)
        view = read_view(store, key) if key else None
        if view is not None:
            return target_of(tasks, view)
    outcome = find_sql_outcome(tasks, name)
    if outcome is not None:
        return Target(outcome.key, None, outcome.task)
    if key is not None:
        raise click.ClickException(f"{name} is absent")
    if not name.isascii() or "[" in name or "{" in name:
        raise click.UsageError(f"{name!r} is neither a task of this app, nor a key, nor a task id")
    found = find_task(app_tasks.stores(tasks), name)
    if found is None:
        raise click.ClickException(
            f"no record has the task id {name}, and no task of this app has that name"
        )
    if found.view is not None:
        return target_of(tasks, replace(found.view, reference=found.reference))
    if found.reference is None:  # it has expired since it was found
        raise click.ClickException(f"the record of the task id {name} is absent")
    raise click.ClickException(
        f"{name} {describe(found.reference)}, under {found.reference.key}, which is absent now"
    )


def describe(reference: Reference) -> str:
    """Returns what a duplicate met, as the rest of a sentence about it."""
    verb = "got the outcome of" if reference.replayed else "met the execution of"
    return f"{verb} task {reference.task_id} (attempt {reference.attempt})"
