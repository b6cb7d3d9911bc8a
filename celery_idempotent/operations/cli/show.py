"""``show``: a record with its outcome; ``explain``: the key of a call, and what would happen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import click

from celery_idempotent.core.printable import plural
from celery_idempotent.core.record import State
from celery_idempotent.core.store import run_sync
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.lookup import SqlOutcome, outcome_or_error, record_document
from celery_idempotent.operations.calls.prediction import ExplainedCall, explain_call, text_of
from celery_idempotent.operations.cli import console
from celery_idempotent.operations.cli.command import (
    RECORD_HELP,
    AppCommand,
    CallKey,
    Tasks,
    key_option,
    parse_arguments,
    print_json,
    resolve_records,
)
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.operations.worker.inspect_commands import Replies, ask, stack_in

#: Seconds to wait for the workers.
WORKER_TIMEOUT = 1.0


@click.command(
    cls=AppCommand,
    help=f"Show a record, and the outcome that its duplicates receive.\n\n{RECORD_HELP}",
)
@click.argument("names", nargs=-1, required=True, metavar="RECORD")
@key_option
@click.pass_obj
def show(
    obj: Any, tasks: Tasks, names: tuple[str, ...], explicit_key: CallKey, as_json: bool
) -> None:
    """Shows records. Its help is the text above, a part of which is shared."""
    ask_worker = cache(partial(ask, obj.app, WORKER_TIMEOUT))
    for key, view, *_ in resolve_records(tasks, names, explicit_key):
        outcome = outcome_or_error(tasks, key)
        document = record_document(key, view, outcome)
        stack, unknown = _stack(ask_worker, view)
        if stack:
            document["stack"] = stack
        if as_json:
            print_json(document)
            continue
        absent = {"key": str(key), "state": "ABSENT: Redis has no record of this key"}
        fields = (absent if view is None else _fields(view)) | {
            "stack": "\n".join(stack) or unknown
        }
        fields |= _database_fields(outcome)
        console.create().print(console.grid(fields | _outcome(document)))


def _stack(ask_worker: Callable[[str], Replies], view: RecordView | None) -> tuple[list[str], str]:
    """Returns where the body of a running call is, by its worker, or why that is unknown."""
    record = view.record if view else None
    worker = record.worker.rpartition("/")[0] if record else ""
    if view is None or record is None or view.state != State.STARTED.value or "@" not in worker:
        return [], ""
    replies = ask_worker(worker)
    stack = stack_in(replies, record)
    return stack, "" if stack else f"unknown: {replies.error or 'the lease is not renewed yet'}"


def _database_fields(outcome: SqlOutcome | IdempotencyError | None) -> dict[str, str]:
    if not isinstance(outcome, SqlOutcome):
        return {"database": str(outcome or "")}
    row, now = outcome.row, outcome.now
    return {
        "database": f"{outcome.name}: {row.state}{', expired' if row.expired else ''}",
        "  task id": row.task_id,
        "  finished": formatting.absolute_time(outcome.finished_at, now),
        "  kept until": formatting.absolute_time(outcome.expires_at, now),
    }


def _fields(view: RecordView) -> dict[str, str]:
    """Returns the fields; those without a value are not printed."""
    record = view.record
    fields = {} if view.reference is None else {"duplicate": formatting.became_text(view.reference)}
    if record is None:
        state = "CORRUPT: the record cannot be read; forget the key to let it run again"
        return fields | {"key": str(view.key), "state": state}
    fields |= formatting.record_texts(record, view.now)
    if record.deadline is not None:
        with contextlib.suppress(IdempotencyError):
            waiting = run_sync(view.store.slot(view.key))
            is_next = waiting is not None and waiting.task_id != record.task_id
            fields["next"] = waiting.task_id if waiting and is_next else ""
    return fields


def _outcome(outcome: dict[str, Any]) -> dict[str, str]:
    if "not_stored" in outcome:
        return {"result": f"not stored: {outcome['not_stored']}"}
    if "error" in outcome:
        return {"error": "{type}: {message}".format(**outcome["error"])}
    return {"result": repr(outcome["result"])} if "result" in outcome else {}


#: Appended to the rule of an explicit key.
_NAMESPACE = ", which never equals a key that the task's rule derives"


@click.command(cls=AppCommand)
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS] [KWARGS]")
@key_option
@click.option("--task-id", help="The id of the message, for the key rule TASK_ID.")
@click.pass_obj
def explain(
    obj: Any,
    tasks: Tasks,
    task: str,
    arguments: tuple[str, ...],
    explicit_key: CallKey,
    task_id: str | None,
    as_json: bool,
) -> None:
    """Show a call's key, and what would happen.

    Shows how the key is derived from the arguments, and predicts what would happen to the call if
    it were published now.

    \b
    celery -A shop idempotency explain shop.charge '[42]' '{"amount": 999}'
    """
    args, kwargs = parse_arguments(arguments)
    try:
        explained = explain_call(
            tasks, task, args, kwargs, explicit_key, task_id, task_id_named="--task-id"
        )
    except TypeError as error:
        raise click.UsageError(str(error)) from None
    in_conflict = explained.prediction.case == "conflict"
    replies = ask(obj.app, WORKER_TIMEOUT if in_conflict else 0)
    waiting = replies.waiting(str(explained.explanation.key))
    if as_json:
        print_json({**explained.to_json(), "waiting": waiting})
    else:
        _print(explained, waiting)


def _print(explained: ExplainedCall, waiting: dict[str, Any] | None) -> None:
    out = console.create()
    key = explained.explanation.key
    if explained.explanation.arguments:
        table = console.table("ARGUMENT", "CANONICAL FORM", "IN KEY", "IN FINGERPRINT")
        for argument in explained.explanation.arguments:
            form = text_of(argument.canonical_bytes) or "none"
            in_key, in_fingerprint = explained.participation(argument)
            table.add_row(console.text(argument.name), console.text(form), in_key, in_fingerprint)
        out.print(table)
    fields = {
        "task": explained.task,
        "rule": explained.explanation.rule + (_NAMESPACE if key.explicit else ""),
        "form": text_of(explained.explanation.canonical_bytes) or "",
        "key": str(key),
        "fingerprint": explained.fingerprint,
        "in Redis": explained.redis_name,
        "prediction": explained.prediction.sentence,
        "waiting": f"{plural(waiting['messages'], 'message')}, since {waiting['since']}"
        if waiting
        else "",
    }
    out.print(console.grid(fields))
