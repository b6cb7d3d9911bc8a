"""``explain``: how the key of a call is derived, and what would happen to the call."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.core.printable import plural
from celery_idempotent.operations.calls.prediction import ExplainedCall, explain_call, text_of
from celery_idempotent.operations.cli import command, console
from celery_idempotent.operations.worker import inspect_commands

#: Seconds to wait for the workers.
WORKER_TIMEOUT = 1.0
#: Appended to the rule of an explicit key.
_NAMESPACE = ", which never equals a key that the task's rule derives"


@click.command(cls=command.AppCommand)
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS] [KWARGS]")
@command.key_option
@click.option("--task-id", help="The id of the message, for the key rule TASK_ID.")
@click.pass_obj
def explain(
    obj: Any,
    tasks: command.Tasks,
    task: str,
    arguments: tuple[str, ...],
    explicit_key: command.CallKey,
    task_id: str | None,
    as_json: bool,
) -> None:
    """Show a call's key, and what would happen.

    Shows how the key is derived from the arguments, and predicts what would happen to the call if
    it were published now.

    \b
    celery -A shop idempotency explain shop.charge '[42]' '{"amount": 999}'
    """
    args, kwargs = command.parse_arguments(arguments)
    try:
        explained = explain_call(
            tasks, task, args, kwargs, explicit_key, task_id, task_id_named="--task-id"
        )
    except TypeError as error:
        raise click.UsageError(str(error)) from None
    in_conflict = explained.prediction.case == "conflict"
    replies = inspect_commands.ask(obj.app, WORKER_TIMEOUT if in_conflict else 0)
    waiting = replies.waiting(str(explained.explanation.key))
    if as_json:
        command.print_json({**explained.to_json(), "waiting": waiting})
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
