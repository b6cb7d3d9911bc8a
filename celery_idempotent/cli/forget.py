"""``forget``: an operator's word, asked for twice and given only for what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import click

from celery_idempotent.cli import formatting as in_words
from celery_idempotent.cli.command import (
    OneLine,
    choosing,
    gated_tasks,
    json_option,
    print_json,
)
from celery_idempotent.cli.target import WORDS_HELP, look, meant
from celery_idempotent.configuration import app_tasks as gated
from celery_idempotent.executor.executor import Gate
from celery_idempotent.record.record import State
from celery_idempotent.store.commands import UNREADABLE
from celery_idempotent.store.record_query import Choice, Sight, sights

FORGOTTEN, RUNNING, CHANGED, ABSENT = "forgotten", "running", "changed", "absent"

_SAYS = {
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


@click.command(cls=OneLine, help=_HELP)
@click.argument("words", nargs=-1, metavar="RECORD…")
@click.option("--key", "own_key", help="The key that the call carried itself.")
@choosing
@click.option("--force", is_flag=True, help="Running ones too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def forget(
    obj: Any,
    words: tuple[str, ...],
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
    if bool(words) == bool(choosy):
        raise click.UsageError("name records, or choose them with --state, --task, --older-than")
    if words:
        found = meant(tasks, words, own_key)
    else:
        choice = Choice(None if state is None else State(state.upper()), task, older_than)
        found = [one for page in sights(gated.stores(tasks), choice) for one in page]
    if found and not yes:
        click.confirm(_question(found), abort=True, err=True)
    gates = {gate.store: gate for gate in (one.idempotency_configuration.gate for one in tasks)}
    fates = {str(sight.key): _forget(sight, gates[sight.store], force=force) for sight in found}
    if as_json:
        print_json([{"key": key, "case": case} for key, case in fates.items()])
    else:
        _print(fates)
    raise SystemExit(0 if all(case in (FORGOTTEN, ABSENT) for case in fates.values()) else 1)


def _question(found: list[Sight]) -> str:
    if len(found) > 1:
        return f"Forget {in_words.plural(len(found), 'record')}?"
    (sight,) = found
    what = "unreadable" if sight.record is None else sight.record.state.value
    return f"Forget {sight.key} ({what})?"


def _forget(sight: Sight, gate: Gate, *, force: bool) -> str:
    if _started(sight) and not force:
        # Its heartbeat extends a lease without changing the token: look once more.
        now = look(sight.store, sight.key) or sight
        if _started(now) and _lease_holds(now):
            return RUNNING
    record = sight.record
    case = gate.forget(sight.key, UNREADABLE if record is None else record)
    return {"ok": FORGOTTEN, "changed": CHANGED, "absent": ABSENT}[case]


def _started(sight: Sight) -> bool:
    return sight.record is not None and sight.record.state is State.STARTED


def _lease_holds(sight: Sight) -> bool:
    deadline = None if sight.record is None else sight.record.deadline
    return deadline is not None and deadline > sight.now


def _print(fates: dict[str, str]) -> None:
    if len(fates) <= 20:
        for key, case in fates.items():
            click.echo(f"{key}: {_SAYS[case]}")
        if not fates:
            click.echo("No such records.")
        return
    for case in _in_order(fates.values()):
        click.echo(f"{sum(1 for fate in fates.values() if fate == case):,} {_SAYS[case]}")


def _in_order(cases: Iterable[str]) -> Iterator[str]:
    present = set(cases)
    return (case for case in _SAYS if case in present)
