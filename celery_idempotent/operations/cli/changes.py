"""``forget``, ``rerun`` and ``purge``: delete records, run calls again, delete expired rows."""

from __future__ import annotations

import getpass
import os
import time
from collections import Counter
from typing import Any

import click

from celery_idempotent import sql
from celery_idempotent.core.printable import plural
from celery_idempotent.core.record import State
from celery_idempotent.errors import CorruptRecordError, IdempotencyError
from celery_idempotent.operations.calls import changes
from celery_idempotent.operations.calls.changes import EndedCall
from celery_idempotent.operations.calls.lookup import Target
from celery_idempotent.operations.cli import command
from celery_idempotent.operations.cli.command import RECORD_HELP, resolve_records
from celery_idempotent.sql.database import Database

#: Rows that one transaction deletes.
BATCH = 500

_FORGET_HELP = f"""Forget records: the next call with their key runs.

A record is forgotten only if it has not changed since it was read, and, without --force, only if
it is not running. A running execution is not stopped; its outcome will be refused.

For a task with a transaction, the outcome in its database is also deleted, even if Redis
has no record: name the call by its key, or by task and arguments. Outcomes of keys that may run
again stay. Name the database of a function's outcome with --database.

{RECORD_HELP}

Or select records with --state, --task, --label and --older-than."""


@click.command(cls=command.AppCommand, help=_FORGET_HELP)
@command.record_options
@click.option("--force", is_flag=True, help="Also forget running records.")
@command.database_option
def forget(
    tasks: command.Tasks,
    names: tuple[str, ...],
    explicit_key: command.CallKey,
    force: bool,
    database: Database | None,
    yes: bool,
    as_json: bool,
    **selected: Any,
) -> None:
    """Forgets records. Its help is the text above, a part of which is shared."""
    if bool(names) == any(selected.values()):
        raise click.UsageError(
            "name records, or select them with --state, --task, --label and --older-than; not both"
        )
    targets = resolve_records(tasks, names, explicit_key, **selected)
    if names:
        targets = [target.with_outcome(tasks) for target in targets]
    if targets and not yes:
        command.confirm("Forget {}?", [_described(target) for target in targets], "record")
    options: dict[str, Any] = {"user": _user_name(), "force": force, "database": database}
    cases = {str(target.key): changes.forget(target, tasks, **options) for target in targets}
    remedies = {
        changes.RUNNING: " (use --force to forget it)",
        changes.CHANGED: "; show it, then forget it again",
    }
    messages = {case: text + remedies.get(case, "") for case, text in changes.MESSAGES.items()}
    command.end(cases, messages, (changes.FORGOTTEN, changes.ABSENT), as_json=as_json)


def _described(target: Target) -> str:
    if target.view is None:
        return f"{target.key} (in the database alone)"
    return f"{target.key} ({'unreadable' if target.view.record is None else target.view.state})"


_RERUN_HELP = f"""Run ended calls again, with their own messages.

Use it for calls that have failed for good (a poisoned task, an error that duplicates get), and for
rejected duplicates. Their messages are kept for as long as errors. The worker forgets the outcome
when the message arrives, unless it has changed since: if two people run a call again, it runs once.

A completed call needs a second confirmation. Its arguments come from the result backend, which
stores them with result_extended.

{RECORD_HELP}

Or select failed calls with --all, --task, --label and --older-than; --state selects others."""


@click.command(cls=command.AppCommand, help=_RERUN_HELP)
@command.record_options
@click.option("--all", "select", is_flag=True, help="Every call that matches the filters.")
@click.option("--completed", is_flag=True, help="Do not ask a second time about completed calls.")
def rerun(
    tasks: command.Tasks,
    names: tuple[str, ...],
    explicit_key: command.CallKey,
    select: bool,
    yes: bool,
    completed: bool,
    as_json: bool,
    **selected: Any,
) -> None:
    """Runs calls again. Its help is the text above, a part of which is shared."""
    if bool(names) == select or (names and any(selected.values())):
        raise click.UsageError("name records, or select them with --all; not both")
    selected["state"] = selected["state"] or State.FAILED
    targets = resolve_records(tasks, names, explicit_key, may_be_absent=True, **selected)
    found = {target.duplicate or str(target.key): _find(tasks, target, names) for target in targets}
    calls = [call for call in found.values() if isinstance(call, EndedCall)]
    done = [call for call in calls if call.has_completed]
    if calls and not yes:
        command.confirm("Run {} again?", [*map(_described_call, calls)], "call")
    if done and not completed:
        command.confirm(
            "Already completed: {}. Repeat the effect?", [*map(_described_call, done)], "call"
        )
    user = _user_name()
    cases = {
        name: call if isinstance(call, str) else _rerun(call, user) for name, call in found.items()
    }
    command.end(cases, changes.MESSAGES, (changes.PUBLISHED,), as_json=as_json)


def _find(tasks: command.Tasks, target: Target, names: tuple[str, ...]) -> EndedCall | str | None:
    """Returns the call, None if it has not ended, or why its message cannot be read."""
    try:
        return changes.find_ended(tasks, target.with_outcome(tasks) if names else target)
    except IdempotencyError as error:
        return f"kept: {error}"


def _rerun(call: EndedCall | None, user: str) -> str:
    try:
        return changes.rerun(call, user=user)
    except CorruptRecordError as error:
        return f"kept: {error}"


def _described_call(call: EndedCall) -> str:
    summary = call.summary and f", {call.summary}"
    return f"{call.key} ({call.state or 'a rejected duplicate'}{summary})"


@click.command(cls=command.AppCommand)
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=BATCH, help="Rows per transaction."
)
@click.option(
    "--pause", type=click.FloatRange(0), default=0.0, help="Seconds between two transactions."
)
@command.database_option
def purge(
    tasks: command.Tasks, batch: int, pause: float, database: Database | None, as_json: bool
) -> None:
    """Delete expired outcomes from the databases of all transactions, and of --database.

    Rows are deleted in batches, oldest first, each in a short transaction. Run it from cron, at any
    time; several may run at once. Expired rows that are not deleted do no harm.
    """
    deleted: Counter[str] = Counter()
    for each in sql.databases(tasks) | ({database} if database else set()):
        found, after = batch, 0
        while found == batch:
            found, after = each.purge(batch, after)
            deleted[each.engine.name] += found
            time.sleep(pause if found == batch else 0)
    if as_json:
        command.print_json({"deleted": deleted})
        return
    for name, number in deleted.items():
        click.echo(f"{name}: deleted {plural(number, 'expired outcome')}")
    if not deleted:
        click.echo("No task has a transaction.")


def _user_name() -> str:
    """Returns who runs the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
