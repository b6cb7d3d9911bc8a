"""``show``: one record, its result decoded, its times in words."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli import console as screen
from celery_idempotent.cli import formatting
from celery_idempotent.cli.command import FriendlyCommand, gated_tasks, json_option, print_json
from celery_idempotent.cli.target import WORDS_HELP, resolve_records
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import json_format
from celery_idempotent.record import steps
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.record_query import RecordView


@click.command(
    cls=FriendlyCommand, help=f"Show a record, and what its duplicates get.\n\n{WORDS_HELP}"
)
@click.argument("names", nargs=-1, required=True, metavar="RECORD")
@click.option("--key", "own_key", help="The key that the call carried itself.")
@json_option
@click.pass_obj
def show(obj: Any, names: tuple[str, ...], own_key: str | None, as_json: bool) -> None:
    """Print it; the help is above, because it is shared."""
    for record_view in resolve_records(gated_tasks(obj.app), names, own_key):
        if as_json:
            outcome = (
                {} if record_view.record is None else json_format.of_outcome(record_view.record)
            )
            print_json({**json_format.of_view(record_view), **outcome})
        else:
            _print(record_view)


def _print(record_view: RecordView) -> None:
    from rich.text import Text

    console = screen.console()
    grid = screen.pairs()
    for name, text in _lines(record_view):
        grid.add_row(name, Text(text, style=screen.STYLES.get(text, "")))
    console.print(grid)


def _lines(record_view: RecordView) -> list[tuple[str, str]]:
    record, now = record_view.record, record_view.now
    name = f"{record_view.key}"
    if record is None:
        return [("key", name), ("state", "cannot be read; forget the key to start afresh")]
    lines = [
        ("key", name),
        ("state", record.state.value),
        ("task id", record.task_id),
        ("worker", record.worker or "–"),
        ("token", str(record.token)),
        ("attempt", _attempt(record)),
        ("started", formatting.exactly(record.started_at, now)),
    ]
    if record.deadline is not None:
        what = "lease" if record.state is State.STARTED else "held"
        over = "ended " if record.deadline <= now else "until "
        lines.append((what, over + formatting.exactly(record.deadline, now)))
        lines += _steps(record)
    else:
        lines.append(("finished", formatting.exactly(record.finished_at, now)))
        lines += _took(record)
        lines.append(_outcome(record))
    lines.append(("kept until", formatting.exactly(record.expires_at, now)))
    return lines


def _attempt(record: Record) -> str:
    died = record.attempt - 1
    return f"{record.attempt}" + (
        f": {formatting.plural(died, 'execution')} died before" if died > 0 else ""
    )


def _took(record: Record) -> list[tuple[str, str]]:
    if record.started_at is None or record.finished_at is None:
        return []
    # The end is known to the millisecond only.
    return [
        (
            "took",
            formatting.span(max(0.0, (record.finished_at - record.started_at).total_seconds())),
        )
    ]


def _steps(record: Record) -> list[tuple[str, str]]:
    try:
        done = ", ".join(steps.read(record.body, record.key))
    except IdempotencyError:
        # Only the beginning of a long record is here.
        return []
    return [("steps done", done)] if done else []


def _outcome(record: Record) -> tuple[str, str]:
    outcome = json_format.of_outcome(record)
    if "not_stored" in outcome:
        return ("result", f"not here: {outcome['not_stored']}")
    if "error" in outcome:
        return ("error", "{type}: {message}".format(**outcome["error"]))
    return ("result", repr(outcome["result"]))
