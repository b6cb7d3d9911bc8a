"""``rerun``: publishes the messages of ended calls again, after confirmation."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli.command import AppCommand, CallKey, Tasks, confirm, end, record_options
from celery_idempotent.cli.forget import user_name
from celery_idempotent.cli.target import RECORD_HELP, Target, resolve_records
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import rerunning
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.monitoring.rerunning import MESSAGES, PUBLISHED, EndedCall
from celery_idempotent.record.record import State

_HELP = f"""Run ended calls again, with their own messages.

Use it for calls that have failed for good (a poisoned task, an error in idempotency_replay_errors),
and for rejected duplicates. Their messages are kept for idempotency_error_ttl. The worker forgets
the outcome when the message arrives, unless it has changed since: if two people run a call again,
it runs once.

A completed call needs a second confirmation. Its arguments come from the result backend, which
stores them with result_extended.

{RECORD_HELP}

Or select what has failed with --all, --task and --older-than."""


@click.command(cls=AppCommand, help=_HELP)
@record_options
@click.option("--all", "select", is_flag=True, help="Every failed call that matches the filters.")
@click.option("--completed", is_flag=True, help="Do not ask a second time about completed calls.")
def rerun(
    tasks: Tasks,
    names: tuple[str, ...],
    explicit_key: CallKey,
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
        confirm("Run {} again?", [*map(_described, calls)], "call")
    if done and not completed:
        confirm("{} has run to its end. Repeat its effect?", [*map(_described, done)], "call")
    user = user_name()
    cases = {
        name: call if isinstance(call, str) else rerunning.rerun(call, user=user)
        for name, call in found.items()
    }
    end(cases, MESSAGES, (PUBLISHED,), as_json=as_json)


def _find(tasks: Tasks, target: Target, names: tuple[str, ...]) -> EndedCall | str | None:
    """Returns the call, None if it has not ended, or why its message cannot be read."""
    key, view, duplicate = target
    try:
        outcome = find_outcome(tasks, key) if names else None
        return rerunning.find_ended(tasks, key, view, outcome, duplicate=duplicate)
    except IdempotencyError as error:
        return f"kept: {error}"


def _described(call: EndedCall) -> str:
    return f"{call.key} ({call.state or 'a rejected duplicate'})"
