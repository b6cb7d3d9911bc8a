"""``forget``: an operator's word, asked for twice and given only for what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import click

from celery_idempotent.cli import formatting
from celery_idempotent.cli.command import (
    FriendlyCommand,
    choosing,
    gated_tasks,
    json_option,
    print_json,
)
from celery_idempotent.cli.target import WORDS_HELP, look, resolve_records
from celery_idempotent.configuration import app_tasks
from celery_idempotent.executor.executor import Executor
from celery_idempotent.record.record import State
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.record_query import RecordFilter, RecordView, record_views

FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"

_MESSAGES = {
    FORGOTTEN: "forgotten",
    RUNNING: "left alone: it runs, and its lease holds (--force)",
    CHANGED: "left alone: it has changed meanwhile; look at it again, and forget what is there now",
    ABSENT: "gone already",
}

_HELP = f"""Forget records: the next call with that key runs.

Only what was seen is forgotten: a record that has changed meanwhile stays, and so does one that
is running, unless --force. An execution under way is not stopped; its outcome will be refused.

{WORDS_HELP}

Or choose many with --state, --task and --older-than."""


@click.command(cls=FriendlyCommand, help=_HELP)
@click.argument("names", nargs=-1, metavar="RECORD…")
@click.option("--key", "own_key", help="The key that the call carried itself.")
@choosing
@click.option("--force", is_flag=True, help="Running ones too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def forget(
    obj: Any,
    names: tuple[str, ...],
    own_key: str | None,
    state: str | None,
    task: str | None,
    older_than: timedelta | None,
    force: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Forget them; the help is above, because a part of it is shared."""
    tasks = gated_tasks(obj.app)
    choosy = state or task or older_than
    if bool(names) == bool(choosy):
        raise click.UsageError("name records, or choose them with --state, --task, --older-than")
    if names:
        found = resolve_records(tasks, names, own_key)
    else:
        record_filter = RecordFilter(
            None if state is None else State(state.upper()), task, older_than
        )
        found = [
            one for page in record_views(app_tasks.stores(tasks), record_filter) for one in page
        ]
    if found and not yes:
        click.confirm(_question(found), abort=True, err=True)
    executors = {
        executor.store: executor
        for executor in (one.idempotency_configuration.executor for one in tasks)
    }
    fates = {
        str(record_view.key): _forget(record_view, executors[record_view.store], force=force)
        for record_view in found
    }
    if as_json:
        print_json([{"key": key, "case": case} for key, case in fates.items()])
    else:
        _print(fates)
    raise SystemExit(0 if all(case in (FORGOTTEN, ABSENT) for case in fates.values()) else 1)


def _question(found: list[RecordView]) -> str:
    if len(found) > 1:
        return f"Forget {formatting.plural(len(found), 'record')}?"
    (record_view,) = found
    what = "unreadable" if record_view.record is None else record_view.record.state.value
    return f"Forget {record_view.key} ({what})?"


def _forget(record_view: RecordView, executor: Executor, *, force: bool) -> str:
    if _started(record_view) and not force:
        # Its heartbeat extends a lease without changing the token: look once more.
        now = look(record_view.store, record_view.key) or record_view
        if _started(now) and _lease_holds(now):
            return RUNNING
    record = record_view.record
    case = executor.forget(record_view.key, UNREADABLE if record is None else record)
    return {"ok": FORGOTTEN, "changed": CHANGED, "absent": ABSENT}[case]


def _started(record_view: RecordView) -> bool:
    return record_view.record is not None and record_view.record.state is State.STARTED


def _lease_holds(record_view: RecordView) -> bool:
    deadline = None if record_view.record is None else record_view.record.deadline
    return deadline is not None and deadline > record_view.now


def _print(fates: dict[str, str]) -> None:
    if len(fates) <= 20:
        for key, case in fates.items():
            click.echo(f"{key}: {_MESSAGES[case]}")
        if not fates:
            click.echo("No such records.")
        return
    for case in _in_order(fates.values()):
        click.echo(f"{sum(1 for fate in fates.values() if fate == case):,} {_MESSAGES[case]}")


def _in_order(cases: Iterable[str]) -> Iterator[str]:
    present = set(cases)
    return (case for case in _MESSAGES if case in present)
