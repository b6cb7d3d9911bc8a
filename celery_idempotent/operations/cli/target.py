"""Finds records and rows by key, by task id, or by task and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.key import Key
from celery_idempotent.core.printable import did_you_mean, one_line
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.operations.calls.lookup import Target, find_outcome, find_record
from celery_idempotent.operations.cli.command import CallKey, parse_arguments
from celery_idempotent.operations.records.query import (
    RecordFilter,
    find_label,
    find_task,
    read_view,
    record_views,
)
from celery_idempotent.operations.records.reader import RecordView

RECORD_HELP = """\b
RECORD is one of:
  a key                      shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ (with or without the prefix)
                             shop.charge:~XUu_BHoPn0pnw_7WY52VtA (an explicit key)
  a task id                  5e1d…  (of a duplicate, or of the executed task: this scans
                             all records)
  a label                    "order 42" (scans all records)
  a task and the arguments that its key rule reads, as JSON
                             shop.charge '[42]', or shop.charge '{"order_id": 42}'
  a task and the call's explicit key
                             shop.charge --key req-7f3a
                             shop.charge --key acme --key req-7f3a (a tuple)"""


def resolve_records(
    tasks: Sequence[IdempotentTaskLike],
    names: tuple[str, ...],
    explicit_key: CallKey,
    *,
    may_be_absent: bool = False,
    **selected: Any,
) -> list[Target]:
    """Returns the records, or rows without a record, that `names` refer to.

    Args:
        selected: fields of a `RecordFilter`, which selects the records if there are no names.
        may_be_absent: also return the key in a duplicate's reference, if record and row are gone.

    Raises:
        ClickException: if a name leads to neither.
        UsageError: if arguments do not fit the task, or `explicit_key` is given without a task.
    """
    if not names:
        pages = record_views(app_tasks.stores(tasks), RecordFilter(**selected))
        return [Target(view.key, view) for page in pages for view in page]
    task = next((task for task in tasks if task.name == names[0]), None)
    if task is not None:
        key = _key_of_call(task, names[1:], explicit_key)
        view = read_view(task.idempotency_configuration.executor.store, key)
        if view is None and find_outcome(tasks, key) is None:
            raise click.ClickException(f"{key} is absent: a call with these arguments would run")
        return [Target(key, view)]
    if explicit_key is not None:
        raise click.UsageError("--key needs a task: shop.charge --key req-7f3a")
    return [target for name in names for target in _find(tasks, name, may_be_absent)]


def _key_of_call(task: IdempotentTaskLike, texts: tuple[str, ...], explicit_key: CallKey) -> Key:
    args, kwargs = parse_arguments(texts)
    if explicit_key is not None:
        kwargs["idempotency_key"] = explicit_key
    try:
        return task.idempotency_key_of(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _find(tasks: Sequence[IdempotentTaskLike], name: str, may_be_absent: bool) -> list[Target]:
    view = find_record(tasks, name)
    if view is not None:
        return [Target(view.key, view)]
    outcome = find_outcome(tasks, name)
    if outcome is not None:
        return [Target(outcome.key, None)]
    stores = app_tasks.stores(tasks)
    known = [task.name for task in tasks]
    task_name = (name.rpartition(":")[0] or name).rpartition(":")[2]
    hint = "" if task_name in known else did_you_mean(task_name, known)
    if any(key_of(name, store.config.prefix) for store in stores):
        raise click.ClickException(f"{name} is absent{hint}")
    shown = one_line(name)
    found = find_task(stores, name)
    if isinstance(found, RecordView):
        return [Target(found.key, found, duplicate=name if found.reference else "")]
    if found is None and (views := find_label(stores, name)):
        return [Target(view.key, view) for view in views]
    if found is None:
        what = "key" if ":" in name else "task of this app"
        raise click.ClickException(
            f"{shown} is not a {what}, and no record has the task id or label {shown}{hint}"
        )
    keys = (key_of(found.key, store.config.prefix) for store in stores if may_be_absent)
    if (key := next(keys, None)) is not None:
        return [Target(key, None, duplicate=name)]
    raise click.ClickException(
        f"{shown} {found.description}, under {found.key}, which is absent now"
    )
