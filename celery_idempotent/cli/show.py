"""``show``: one record with its decoded outcome."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli import console
from celery_idempotent.cli.command import (
    FriendlyCommand,
    OwnKey,
    idempotent_tasks,
    json_option,
    own_key_option,
    print_json,
)
from celery_idempotent.cli.target import RECORD_HELP, Target, describe, resolve_records
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import formatting, json_format
from celery_idempotent.monitoring.sql_outcome import SqlOutcome
from celery_idempotent.record import steps, turn
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.inspection.record_query import RecordView


@click.command(
    cls=FriendlyCommand,
    help=f"Show a record and the outcome that its duplicates get.\n\n{RECORD_HELP}",
)
@click.argument("names", nargs=-1, required=True, metavar="RECORD")
@own_key_option
@json_option
@click.pass_obj
def show(obj: Any, names: tuple[str, ...], own_key: OwnKey, as_json: bool) -> None:
    """Shows records. The help text is above, because a part of it is shared."""
    for target in resolve_records(idempotent_tasks(obj.app), names, own_key):
        if as_json:
            print_json(_document(target))
        else:
            _print(target)


def _document(target: Target) -> dict[str, Any]:
    view, key = target.view, target.key
    outcome, error = _outcome_in_database(target)
    document = {} if outcome is None else {"sql_outcome": outcome.to_json()}
    if error:
        document["sql_outcome"] = {"error": error}
    if view is not None:
        fields = {} if view.record is None else json_format.outcome_fields(view.record)
        return {**json_format.view_fields(view), **fields, **document}
    fields = {} if outcome is None else outcome.outcome_fields()
    names = {"key": str(key), "explicit": key.explicit, "task": key.task, "state": "ABSENT"}
    return {**names, **fields, **document}


def _outcome_in_database(target: Target) -> tuple[SqlOutcome | None, str]:
    """Returns the row, or why it cannot be read."""
    try:
        return target.outcome(), ""
    except IdempotencyError as error:
        return None, str(error)


def _print(target: Target) -> None:
    out = console.create()
    fields = [("key", str(target.key)), ("state", "ABSENT: Redis has no record of this key")]
    if target.view is not None:
        fields = _fields(target.view)
    grid = console.field_grid()
    for name, value in [*fields, *_database_fields(target)]:
        grid.add_row(name, console.text(value, console.STATE_STYLES.get(value, "")))
    out.print(grid)


def _database_fields(target: Target) -> list[tuple[str, str]]:
    outcome, error = _outcome_in_database(target)
    if outcome is None:
        return [("database", error)] if error else []
    row, now = outcome.row, outcome.now
    record = None if target.view is None else target.view.record
    is_shown = record is not None and record.state.finished
    return [
        ("database", f"{outcome.name}: {row.state}{', expired' if row.expired else ''}"),
        ("  task id", row.task_id),
        ("  finished", formatting.absolute_time(outcome.finished_at, now)),
        ("  kept until", formatting.absolute_time(outcome.expires_at, now)),
        *([] if is_shown else [_outcome(outcome.outcome_fields())]),
    ]


def _fields(view: RecordView) -> list[tuple[str, str]]:
    record, now = view.record, view.now
    duplicate = [] if view.reference is None else [("duplicate", describe(view.reference))]
    if record is None:
        return [
            *duplicate,
            ("key", str(view.key)),
            ("state", "CORRUPT: the record cannot be read; forget the key to let it run again"),
        ]
    fields = [
        *duplicate,
        ("key", str(view.key)),
        *([("label", record.label)] if record.label else []),
        ("state", record.state.value),
        ("task id", record.task_id),
        ("worker", record.worker or "–"),
        ("token", str(record.token)),
        ("attempt", _attempt(record)),
        ("started", formatting.absolute_time(record.started_at, now)),
    ]
    if record.deadline is not None:
        label = "lease" if record.state is State.STARTED else "reserved"
        verb = "expired" if record.deadline <= now else "until"
        fields.append((label, f"{verb} {formatting.absolute_time(record.deadline, now)}"))
        fields += _waiting(record)
        if record.ended_by:
            fields.append(("ended by", record.ended_by.replace("_", " ")))
        fields += _steps(record)
    else:
        fields.append(("finished", formatting.absolute_time(record.finished_at, now)))
        fields += _duration(record)
        fields.append(_outcome(json_format.outcome_fields(record)))
    return [*fields, ("kept until", formatting.absolute_time(record.expires_at, now))]


def _attempt(record: Record) -> str:
    if record.attempt <= 1:
        return str(record.attempt)
    died = formatting.plural(record.attempt - 1, "earlier execution")
    return f"{record.attempt}: {died} died"


def _duration(record: Record) -> list[tuple[str, str]]:
    if record.started_at is None or record.finished_at is None:
        return []
    # The end is stored in milliseconds, the start in microseconds.
    seconds = max(0.0, (record.finished_at - record.started_at).total_seconds())
    return [("duration", formatting.duration(seconds))]


def _waiting(record: Record) -> list[tuple[str, str]]:
    try:
        waiting = turn.waiting(record)
    except IdempotencyError:
        return []
    return [("next", waiting.task_id)] if waiting else []


def _steps(record: Record) -> list[tuple[str, str]]:
    try:
        finished = ", ".join(steps.read(record.body, record.key))
    except IdempotencyError:
        # A scan reads only the beginning of a long record.
        return []
    return [("finished steps", finished)] if finished else []


def _outcome(outcome: dict[str, Any]) -> tuple[str, str]:
    if "not_stored" in outcome:
        return ("result", f"not stored: {outcome['not_stored']}")
    if "error" in outcome:
        return ("error", "{type}: {message}".format(**outcome["error"]))
    return ("result", repr(outcome["result"]))
