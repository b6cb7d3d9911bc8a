"""``forget``: deletes records, after confirmation, if they have not changed since."""

from __future__ import annotations

import getpass
import os
from typing import Any

import click

from celery_idempotent.cli.command import (
    AppCommand,
    CallKey,
    Tasks,
    confirm,
    databases_option,
    end,
    record_options,
)
from celery_idempotent.cli.target import RECORD_HELP, Target, resolve_records
from celery_idempotent.monitoring import forgetting
from celery_idempotent.monitoring.forgetting import ABSENT, CHANGED, FORGOTTEN, RUNNING
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.sql.database import Database

_MESSAGES = {
    FORGOTTEN: "forgotten",
    RUNNING: "kept: it is running, and its lease has not expired (use --force to forget it)",
    CHANGED: "kept: it has changed meanwhile; show it, then forget it again",
    ABSENT: "already absent",
}

_HELP = f"""Forget records: the next call with their key runs.

A record is forgotten only if it has not changed since it was read, and, without --force, only if
it is not running. A running execution is not stopped; its outcome will be refused.

For a task with idempotency_transaction, the outcome in its database is deleted, too, even if Redis
has no record of the key: name it by its key, or by task and arguments. The rows of steps are also
deleted, in the databases that any task names; --database adds others.

{RECORD_HELP}

Or select records with --state, --task and --older-than."""


@click.command(cls=AppCommand, help=_HELP)
@record_options
@click.option("--force", is_flag=True, help="Forget running records, too.")
@databases_option
def forget(
    tasks: Tasks,
    names: tuple[str, ...],
    explicit_key: CallKey,
    force: bool,
    databases: set[Database],
    yes: bool,
    as_json: bool,
    **selected: Any,
) -> None:
    """Forgets records. Its help is the text above, a part of which is shared."""
    if bool(names) == any(selected.values()):
        raise click.UsageError(
            "name records, or select them with --state, --task and --older-than; not both"
        )
    targets = resolve_records(tasks, names, explicit_key, **selected)
    outcomes = {target.key: find_outcome(tasks, target.key) for target in targets if names}
    if targets and not yes:
        confirm("Forget {}?", [_described(target) for target in targets], "record")
    options: dict[str, Any] = {"user": user_name(), "force": force, "databases": databases}
    cases = {
        str(key): forgetting.forget(key, view, tasks, outcome=outcomes.get(key), **options)
        for key, view, _ in targets
    }
    end(cases, _MESSAGES, (FORGOTTEN, ABSENT), as_json=as_json)


def _described(target: Target) -> str:
    if target.view is None:
        return f"{target.key} (in the database alone)"
    return f"{target.key} ({'unreadable' if target.view.record is None else target.view.state})"


def user_name() -> str:
    """Returns who runs the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"
