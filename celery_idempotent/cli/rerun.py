"""``rerun``: publishes the messages of ended calls again, after confirmation."""

from __future__ import annotations

import click

from celery_idempotent.cli.command import (
    AppCommand,
    OwnKey,
    Tasks,
    filter_options,
    own_key_option,
    print_json,
)
from celery_idempotent.cli.forget import print_cases, user_name
from celery_idempotent.cli.target import RECORD_HELP, Target, resolve_records
from celery_idempotent.configuration import app_tasks
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.monitoring import rerunning
from celery_idempotent.monitoring.lookup import find_outcome
from celery_idempotent.monitoring.rerunning import MESSAGES, PUBLISHED, EndedCall
from celery_idempotent.printable import one_line, plural
from celery_idempotent.record.record import State
from celery_idempotent.store.inspection.record_query import RecordFilter, record_views

_HELP = f"""Run ended calls again, with their own messages.

For calls that have failed for good (a poisoned task, an error in idempotency_replay_errors), and
for duplicates that were rejected. Their messages are kept for idempotency_error_ttl. The worker
forgets the outcome when the message arrives, unless it has changed since: two people who run a
call again run it once.

A call that has completed is asked about a second time. Its arguments come from the result backend,
which has them with result_extended.

{RECORD_HELP}

Or select what has failed with --all, --task and --older-than."""


@click.command(cls=AppCommand, help=_HELP)
@click.argument("names", nargs=-1, metavar="RECORD…")
@own_key_option
@click.option("--all", "select", is_flag=True, help="Every failed call that the filters select.")
@filter_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--completed", is_flag=True, help="Do not ask a second time about completed calls.")
def rerun(
    tasks: Tasks,
    names: tuple[str, ...],
    own_key: OwnKey,
    select: bool,
    record_filter: RecordFilter,
    yes: bool,
    completed: bool,
    as_json: bool,
) -> None:
    """Runs calls again. The help text is above, because a part of it is shared."""
    if bool(names) == select or (names and record_filter != RecordFilter()):
        raise click.UsageError("name records, or select them with --all; not both")
    if names:
        targets = resolve_records(tasks, names, own_key, may_be_absent=True)
    else:
        record_filter = RecordFilter(
            record_filter.state or State.FAILED, record_filter.task, record_filter.older_than
        )
        pages = record_views(app_tasks.stores(tasks), record_filter)
        targets = [Target(view.key, view) for page in pages for view in page]
    found = {target.duplicate or str(target.key): _find(tasks, target, names) for target in targets}
    calls = [call for call in found.values() if isinstance(call, EndedCall)]
    done = [call for call in calls if call.has_completed]
    if calls and not yes:
        _confirm(calls, "Run {} again?")
    if done and not completed:
        _confirm(done, "{} has run to its end. Repeat its effect?")
    user = user_name()
    cases = {
        name: call if isinstance(call, str) else rerunning.rerun(call, user=user)
        for name, call in found.items()
    }
    if as_json:
        print_json([{"key": name, "case": case} for name, case in cases.items()])
    else:
        print_cases(cases, MESSAGES)
    raise SystemExit(0 if all(case == PUBLISHED for case in cases.values()) else 1)


def _find(tasks: Tasks, target: Target, names: tuple[str, ...]) -> EndedCall | str | None:
    """Returns the call, None if it has not ended, or why its message cannot be read."""
    key, view, duplicate = target
    try:
        outcome = find_outcome(tasks, key) if names else None
        return rerunning.find_ended(tasks, key, view, outcome, duplicate=duplicate)
    except IdempotencyError as error:
        return f"kept: {error}"


def _confirm(calls: list[EndedCall], question: str) -> None:
    subject = plural(len(calls), "call")
    if len(calls) == 1:
        call = calls[0]
        subject = f"{call.key} ({call.state or 'a rejected duplicate'})"
    click.confirm(one_line(question.format(subject)), abort=True, err=True)
