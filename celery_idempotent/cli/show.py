"""``show``: one record, its result decoded, its times in words."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli import console as screen
from celery_idempotent.cli import formatting as words
from celery_idempotent.cli.command import OneLine, gated_tasks, json_option, print_json
from celery_idempotent.cli.target import WORDS_HELP, meant
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import json_format as document
from celery_idempotent.record import steps
from celery_idempotent.record.record import Record, State
from celery_idempotent.store.record_query import Sight


@click.command(cls=OneLine, help=f"Show a record, and what its duplicates get.\n\n{WORDS_HELP}")
@click.argument("words", nargs=-1, required=True, metavar="RECORD")
@click.option("--key", "own_key", help="The key that the call carried itself.")
@json_option
@click.pass_obj
def show(obj: Any, words: tuple[str, ...], own_key: str | None, as_json: bool) -> None:
    """Print it; the help is above, because it is shared."""
    for sight in meant(gated_tasks(obj.app), words, own_key):
        if as_json:
            outcome = {} if sight.record is None else document.of_outcome(sight.record)
            print_json({**document.of_sight(sight), **outcome})
        else:
            _print(sight)


def _print(sight: Sight) -> None:
    from rich.text import Text

    console = screen.console()
    grid = screen.pairs()
    for name, text in _lines(sight):
        grid.add_row(name, Text(text, style=screen.STYLES.get(text, "")))
    console.print(grid)


def _lines(sight: Sight) -> list[tuple[str, str]]:
    record, now = sight.record, sight.now
    name = f"{sight.key}"
    if record is None:
        return [("key", name), ("state", "cannot be read; forget the key to start afresh")]
    lines = [
        ("key", name),
        ("state", record.state.value),
        ("task id", record.task_id),
        ("worker", record.worker or "–"),
        ("token", str(record.token)),
        ("attempt", _attempt(record)),
        ("started", words.exactly(record.started_at, now)),
    ]
    if record.deadline is not None:
        what = "lease" if record.state is State.STARTED else "held"
        over = "ended " if record.deadline <= now else "until "
        lines.append((what, over + words.exactly(record.deadline, now)))
        lines += _steps(record)
    else:
        lines.append(("finished", words.exactly(record.finished_at, now)))
        lines += _took(record)
        lines.append(_outcome(record))
    lines.append(("kept until", words.exactly(record.expires_at, now)))
    return lines


def _attempt(record: Record) -> str:
    died = record.attempt - 1
    return f"{record.attempt}" + (
        f": {words.plural(died, 'execution')} died before" if died > 0 else ""
    )


def _took(record: Record) -> list[tuple[str, str]]:
    if record.started_at is None or record.finished_at is None:
        return []
    # The end is known to the millisecond only.
    return [
        ("took", words.span(max(0.0, (record.finished_at - record.started_at).total_seconds())))
    ]


def _steps(record: Record) -> list[tuple[str, str]]:
    try:
        done = ", ".join(steps.read(record.body, record.key))
    except IdempotencyError:
        # Only the beginning of a long record is here.
        return []
    return [("steps done", done)] if done else []


def _outcome(record: Record) -> tuple[str, str]:
    outcome = document.of_outcome(record)
    if "not_stored" in outcome:
        return ("result", f"not here: {outcome['not_stored']}")
    if "error" in outcome:
        return ("error", "{type}: {message}".format(**outcome["error"]))
    return ("result", repr(outcome["result"]))
