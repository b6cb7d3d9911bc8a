"""``forget``: deletes records, after confirmation and only if they are unchanged since."""

from __future__ import annotations

import getpass
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from celery_idempotent.cli.command import (
    AppCommand,
    OwnKey,
    Tasks,
    databases_option,
    filter_options,
    own_key_option,
    print_json,
)
from celery_idempotent.cli.target import RECORD_HELP, Target, resolve_records
from celery_idempotent.configuration import app_tasks
from celery_idempotent.monitoring import forgetting
from celery_idempotent.monitoring.forgetting import ABSENT, CHANGED, FORGOTTEN, RUNNING
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.printable import one_line, plural
from celery_idempotent.sql.database import Database
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views

_MESSAGES = {
    FORGOTTEN: "forgotten",
    RUNNING: "kept: it is running, and its lease has not expired (use --force to forget it)",
    CHANGED: "kept: it has changed meanwhile; show it, then forget it again",
    ABSENT: "already absent",
}

#: With more records than this, only the number of each case is printed.
_MAX_LINES = 20

_HELP = f"""Forget records: the next call with their key runs.

A record is forgotten only if it has not changed since it was read, and, without --force, only if
it is not running. A running execution is not stopped; its outcome will be refused.

Of a task with idempotency_transaction, the outcome in its database is deleted, too, also if Redis
has no record of the key: name it by its key, or by task and arguments. So are the rows of steps, in
the databases that any task names; --database adds others.

{RECORD_HELP}

Or select records with --state, --task and --older-than."""


@click.command(cls=AppCommand, help=_HELP)
@click.argument("names", nargs=-1, metavar="RECORD…")
@own_key_option
@filter_options
@click.option("--force", is_flag=True, help="Forget running records, too.")
@databases_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def forget(
    tasks: Tasks,
    names: tuple[str, ...],
    own_key: OwnKey,
    record_filter: RecordFilter,
    force: bool,
    databases: set[Database],
    yes: bool,
    as_json: bool,
) -> None:
    """Forgets records. The help text is above, because a part of it is shared."""
    if bool(names) == (record_filter != RecordFilter()):
        raise click.UsageError(
            "name records, or select them with --state, --task and --older-than; not both"
        )
    if names:
        targets = resolve_records(tasks, names, own_key)
    else:
        pages = record_views(app_tasks.stores(tasks), record_filter)
        targets = [Target(view.key, view) for page in pages for view in page]
    outcomes = {target.key: find_outcome(tasks, target.key) for target in targets if names}
    if targets and not yes:
        click.confirm(one_line(_question(targets)), abort=True, err=True)
    options: dict[str, Any] = {"user": user_name(), "force": force, "databases": databases}
    cases = {
        str(key): forgetting.forget(key, view, tasks, outcome=outcomes.get(key), **options)
        for key, view, _ in targets
    }
    if as_json:
        print_json([{"key": key, "case": case} for key, case in cases.items()])
    else:
        print_cases(cases, _MESSAGES)
    raise SystemExit(0 if all(case in (FORGOTTEN, ABSENT) for case in cases.values()) else 1)


def _question(targets: list[Target]) -> str:
    if len(targets) > 1:
        return f"Forget {plural(len(targets), 'record')}?"
    ((key, view, _),) = targets
    if view is None:
        return f"Forget {key} (in the database alone)?"
    return f"Forget {key} ({'unreadable' if view.record is None else view.state})?"


def user_name() -> str:
    """Returns who runs the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def print_cases(cases: dict[str, str], messages: Mapping[str, str]) -> None:
    """Prints what became of each key; of many, the number of each case."""
    if not cases:
        click.echo("No matching records.")
    elif len(cases) <= _MAX_LINES:
        for key, case in cases.items():
            click.echo(one_line(f"{key}: {messages.get(case, case)}"))
    else:
        numbers = Counter(cases.values())
        for case in (case for case in {**messages, **numbers} if numbers[case]):
            click.echo(one_line(f"{numbers[case]:,} {messages.get(case, case)}"))
