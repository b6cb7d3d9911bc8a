"""``explain``: how the key of a call is derived, and what would happen to the call."""

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
    parse_arguments,
    print_json,
)
from celery_idempotent.cli.target import read_view
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.key.explanation import Argument, Explanation
from celery_idempotent.key.explicit import message_form
from celery_idempotent.key.rule import TASK_ID
from celery_idempotent.monitoring import json_format
from celery_idempotent.monitoring.prediction import Prediction, predict
from celery_idempotent.store.inspection.record_query import RecordView

#: What follows from an explicit key.
_NAMESPACE = ", which never equals a key that the task's rule derives"


@click.command(cls=FriendlyCommand)
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS] [KWARGS]")
@own_key_option
@click.option("--task-id", help="The id of the message, for the key rule TASK_ID.")
@json_option
@click.pass_obj
def explain(
    obj: Any,
    task: str,
    arguments: tuple[str, ...],
    own_key: OwnKey,
    task_id: str | None,
    as_json: bool,
) -> None:
    """Show a call's key, and what would happen.

    Shows how the key is derived from the arguments, and predicts what would happen to the call if
    it were published now.

    \b
    celery -A shop idempotency explain shop.charge '[42]' '{"amount": 999}'
    """
    tasks = {candidate.name: candidate for candidate in idempotent_tasks(obj.app)}
    if task not in tasks:
        raise click.ClickException(f"{task!r} is not an idempotent task of this app")
    args, kwargs = parse_arguments(arguments)
    configuration = tasks[task].idempotency_configuration
    if configuration.settings.key is TASK_ID and not (own_key or task_id):
        raise click.UsageError(f"the key rule of {task} is TASK_ID: give --task-id")
    try:
        explicit = None if own_key is None else message_form(task, own_key)
        explanation = configuration.rule.explain(args, kwargs, task_id=task_id, explicit=explicit)
    except TypeError as error:
        raise click.UsageError(f"the arguments do not fit {task}: {error}") from None
    store = configuration.executor.store
    view = read_view(store, explanation.key)
    prediction = predict(explanation.key, configuration.settings, view)
    redis_name = store.name(explanation.key)
    if as_json:
        print_json(_document(tasks[task], explanation, redis_name, view, prediction))
    else:
        _print(tasks[task], explanation, redis_name, prediction)


def _document(
    task: IdempotentTaskLike,
    explanation: Explanation,
    redis_name: str,
    view: RecordView | None,
    prediction: Prediction,
) -> dict[str, Any]:
    return {
        "task": task.name,
        "rule": explanation.rule,
        "arguments": [
            {
                "name": argument.name,
                "canonical": _text(argument.canonical_bytes),
                "at_default": argument.at_default,
                "in_key": argument.in_key,
            }
            for argument in explanation.arguments
        ],
        "form": _text(explanation.canonical_bytes),
        "key": str(explanation.key),
        "explicit": explanation.key.explicit,
        "fingerprint": explanation.key.fingerprint.hex(),
        "redis_name": redis_name,
        "record": None if view is None else json_format.view_fields(view),
        "prediction": prediction._asdict(),
    }


def _print(
    task: IdempotentTaskLike, explanation: Explanation, redis_name: str, prediction: Prediction
) -> None:
    out = console.create()
    from rich.text import Text

    if explanation.arguments:
        table = console.table("ARGUMENT", "CANONICAL FORM", "IN KEY", "IN FINGERPRINT")
        for argument in explanation.arguments:
            form = _text(argument.canonical_bytes) or "none"
            in_key, in_fingerprint = _participation(argument, explanation)
            table.add_row(Text(argument.name), Text(form), in_key, in_fingerprint)
        out.print(table)
    grid = console.field_grid()
    fields = (
        ("task", task.name),
        ("rule", explanation.rule + (_NAMESPACE if explanation.key.explicit else "")),
        ("form", _text(explanation.canonical_bytes) or ""),
        ("key", str(explanation.key)),
        ("fingerprint", explanation.key.fingerprint.hex() or "none: the key covers all arguments"),
        ("in Redis", redis_name),
        ("prediction", prediction.sentence),
    )
    for label, text in fields:
        grid.add_row(label, Text(text))
    out.print(grid)


def _participation(argument: Argument, explanation: Explanation) -> tuple[str, str]:
    in_key = {True: "yes", False: "no", None: "decided by the callable"}[argument.in_key]
    if explanation.key.fingerprint:
        return in_key, "no: at its default" if argument.at_default else "yes"
    return ("no: at its default" if argument.at_default and argument.in_key else in_key), "no"


def _text(form: bytes | None) -> str | None:
    return None if form is None else form.decode(errors="backslashreplace")
